// The page of results: sections that have all words of the query, the best first, each with the words around a match.
// `sections.json` is what nanovllm/lab/site/search.py has written.

const MOST_PER_PAGE = 3;
const MOST = 40;
const AROUND = 110; // letters on each side of a match
const ROOT = document.documentElement.dataset.content_root;
// Words of questions, which say nothing about their subject.
const EMPTY = new Set("a an and are can do does for from how i in is it of on or the to was what when where which who why with".split(" "));
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

/** How well a section fits: 0 if it lacks a word. A page that has them often is about them. */
function scoreOf([, heading, prose, names], title, { words, phrase }, ofPage) {
  let score = 0;
  if (isExactly(phrase, heading.replace(/^[\d.· ]+/, ""))) score += 12;
  if (words.length > 1) score += 15 * Math.min(1, count(phrase, heading)) + 5 * Math.log2(1 + count(phrase, prose));
  for (const [number, word] of words.entries()) {
    const places = [count(word, heading), count(word, title), count(word, prose), count(word, names)];
    if (!places.some(Boolean)) return 0;
    const [inHeading, inTitle, inProse, inNames] = places;
    score += 10 * Math.min(1, inHeading) + 5 * Math.min(1, inTitle) + 3 * Math.log2(1 + inProse) + Math.log2(1 + inNames);
    score += 3 * Math.log2(1 + ofPage[number]);
  }
  return score;
}

/** The best sections of all pages: [{page, title, anchor, heading, prose, names, score}, ...]. */
function search(pages, patterns) {
  const found = [];
  for (const { page, weight, sections } of pages) {
    const [[, title]] = sections;
    const ofPage = patterns.words.map((word) => sections.reduce((sum, [, , prose]) => sum + count(word, prose), 0));
    const scored = sections.map((section) => {
      const [anchor, heading, prose, names] = section;
      return { page, title, anchor, heading, prose, names, score: weight * scoreOf(section, title, patterns, ofPage) };
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

function show(results, patterns, query) {
  const place = document.querySelector("#search-results");
  const pages = new Set(results.map(({ page }) => page)).size;
  const many = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
  const shown = results.slice(0, MOST);
  const cut = results.length > MOST ? `; these are the best ${MOST}` : "";
  const told = `${many(results.length, "section")} of ${many(pages, "page")}${cut}`;
  const nothing = `Nothing has all words of “${query}”. Fewer words find more.`;
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
  show(search(await answer.json(), patterns), patterns, query);
}
