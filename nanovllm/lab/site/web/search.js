// The page of results: sections that have all words of the query, or else most of them, the best first, each with the words
// around a match.
// `sections.json` is what nanovllm/lab/site/search.py has written.

const MOST_PER_PAGE = 3;
const MOST = 40;
const ENOUGH = 8;
const AROUND = 110; // letters on each side of a match
const ROOT = document.documentElement.dataset.content_root;
// Words of questions, which say nothing about their subject.
const EMPTY = new Set("a an and are can do does for from how i if in is it me my of on or our s somebody t that the there to was we what when whenever where which who why with you your".split(" "));
const LETTER = "[\\p{L}\\p{N}]";

const make = (name, values, ...children) => {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
};

/** What a word and its other forms begin with: "preempt" of "preemptions", "tabl" of "tables". */
function stem(word) {
  const bare = word.replace(/(?:ions?|ings?|ed|es|s|e)$/, "");
  return bare.length >= 4 ? bare : word;
}

/** A pattern of each word of a query in all its forms, and of the words in a row. */
function patternsOf(query) {
  const all = query.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const telling = all.filter((word) => !EMPTY.has(word));
  const found = telling.length ? telling : all;
  const stems = [...new Set(found)].map(stem);
  const form = (each) => `${each}${LETTER}*`;
  const words = stems.map((each) => new RegExp(`(?<!${LETTER})${form(each)}`, "giu"));
  const phrase = new RegExp(`(?<!${LETTER})${found.map(stem).map(form).join("[^\\p{L}\\p{N}]{1,3}")}`, "giu");
  return { words, phrase };
}

const count = (pattern, text) => text.match(pattern)?.length ?? 0;

const isExactly = (pattern, text) => text.match(pattern)?.[0] === text;

/** How well a section fits: 0 if it has fewer than `least` of the words. A page that has them often is about them, and most
 * of all the lecture whose number is among them. */
function scoreOf([, heading, prose, names], title, { words, phrase }, ofPage, least) {
  let score = 0;
  let missing = 0;
  if (isExactly(phrase, heading.replace(/^[\d.· ]+/, ""))) score += 12;
  if (words.length > 1) score += 15 * Math.min(1, count(phrase, heading)) + 5 * Math.log2(1 + count(phrase, prose));
  for (const [number, word] of words.entries()) {
    const places = [count(word, heading), count(word, title), count(word, prose), count(word, names)];
    if (!places.some(Boolean)) {
      missing += 1;
      continue;
    }
    if (/^\d+$/.test(title.match(word)?.[0]) && title.search(word) === 0) score += 20;
    const [inHeading, inTitle, inProse, inNames] = places;
    score += 10 * Math.min(1, inHeading) + 5 * Math.min(1, inTitle) + 3 * Math.log2(1 + inProse) + Math.log2(1 + inNames);
    score += 3 * Math.log2(1 + ofPage[number]);
  }
  return words.length - missing < least ? 0 : score;
}

/** The best sections of all pages that have at least that many of the words: [{page, title, anchor, heading, prose, names,
 * score}, ...]. */
function search(pages, patterns, least) {
  const found = [];
  for (const { page, weight, sections } of pages) {
    const [[, title]] = sections;
    const ofPage = patterns.words.map((word) => sections.reduce((sum, [, , prose]) => sum + count(word, prose), 0));
    const scored = sections.map((section) => {
      const [anchor, heading, prose, names] = section;
      return { page, title, anchor, heading, prose, names, score: weight * scoreOf(section, title, patterns, ofPage, least) };
    });
    scored.sort((one, other) => other.score - one.score);
    found.push(...scored.slice(0, MOST_PER_PAGE).filter(({ score }) => score > 0));
  }
  return found.sort((one, other) => other.score - one.score);
}

/** The words around the first match in a section, with all matches in them marked. */
function context({ prose, names }, { words, phrase }) {
  const first = [phrase, ...words].map((pattern) => prose.search(pattern)).find((at) => at >= 0);
  if (first === undefined) {
    const matching = names.split(" ").filter((name) => words.some((word) => count(word, name)));
    const shown = matching.slice(0, 5).flatMap((name) => [make("code", { textContent: name }), " "]);
    return shown.length ? make("p", {}, "In its code: ", ...shown) : make("p", {}, prose.slice(0, 2 * AROUND));
  }
  const begin = first <= AROUND ? 0 : prose.indexOf(" ", first - AROUND) + 1;
  const end = prose.length <= first + AROUND ? prose.length : prose.lastIndexOf(" ", first + AROUND);
  const piece = prose.slice(begin, Math.max(end, first));
  const line = make("p", {}, begin ? "… " : "");
  let told = 0;
  const matches = words.flatMap((word) => [...piece.matchAll(word)]).sort((one, other) => one.index - other.index);
  for (const { index, 0: text } of matches) {
    line.append(piece.slice(told, index), make("mark", { textContent: text }));
    told = index + text.length;
  }
  line.append(piece.slice(told), end < prose.length ? " …" : "");
  return line;
}

/** The best sections that have all words. Where they are few, those that lack one come next, then those that lack two, and so
 * on, down to half of the words. */
function closest(pages, patterns) {
  const all = patterns.words.length;
  const results = [];
  let numWhole = 0;
  for (let least = all; least >= all / 2 && results.length < ENOUGH; least -= 1) {
    const isNew = ({ page, anchor }) => !results.some((known) => known.page === page && known.anchor === anchor);
    results.push(...search(pages, patterns, least).filter(isNew));
    if (least === all) numWhole = results.length;
  }
  return { results, numWhole };
}

function show({ results, numWhole }, patterns, query) {
  const place = document.querySelector("#search-results");
  const pages = new Set(results.map(({ page }) => page)).size;
  const many = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const shown = results.slice(0, MOST);
  const cut = results.length > MOST ? `; these are the best ${MOST}` : "";
  const isWhole = numWhole === results.length;
  const lacking = isWhole ? "" : `${numWhole || "Nothing"} ${numWhole > 1 ? "have" : "has"} all words of “${query}”. With the closest: `;
  const told = `${lacking}${many(results.length, "section")} of ${many(pages, "page")}${cut}`;
  const nothing = `Nothing has half of the words of “${query}”.`;
  const items = shown.map((result) => {
    const { page, title, heading, anchor } = result;
    const link = make("a", { href: `${ROOT}${page}#${anchor}` }, title, ...(heading === title ? [] : [` › ${heading}`]));
    return make("li", {}, link, context(result, patterns));
  });
  // The page that is opened marks these words (sphinx_highlight.js).
  place.addEventListener("click", () => localStorage.setItem("sphinx_highlight_terms", query.toLowerCase()));
  place.replaceChildren(make("p", { role: "status" }, results.length ? told : nothing), make("ol", { className: "search" }, ...items));
}

const query = new URLSearchParams(location.search).get("q")?.trim() ?? "";
for (const field of document.querySelectorAll('input[name="q"]')) field.value = query;
const patterns = patternsOf(query);
if (patterns.words.length) {
  const answer = await fetch(`${ROOT}_static/sections.json`);
  show(closest(await answer.json(), patterns), patterns, query);
}
