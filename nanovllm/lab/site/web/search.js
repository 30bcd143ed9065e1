// The page of results: sections that have all words of the query, or else most of them, the best first, each with the words
// around a match.
// `sections.json` is what nanovllm/lab/site/search.py has written.

const MOST_PER_PAGE = 3;
const MOST = 40;
const ENOUGH = 8;
const AROUND = 110; // letters on each side of a match
const ROOT = document.documentElement.dataset.content_root;
// Words that mean the same: who asks how to run a server is told how to start it.
const SAME = [["run", "start", "launch"]];
// Words of questions, which say nothing about their subject.
const EMPTY = new Set("a an and are can do does explain explains for from how i if in is it me my of on or our s somebody t that the there to was we what when whenever where which who why with you your".split(" "));
const LETTER = "[\\p{L}\\p{N}]";

const make = (name, values, ...children) => {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
};

/** What a word and its other forms begin with: "preempt" of "preemptions", "serv" of "servers". */
function stem(word) {
  const bare = word.replace(/(?:ions?|ings?|ers?|ed|es|s|e)$/, "");
  return bare.length >= 4 ? bare : word;
}

/** A pattern of each word of a query in all its forms, and of the words in a row. */
function patternsOf(query) {
  const all = query.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const telling = all.filter((word) => !EMPTY.has(word));
  const found = telling.length ? telling : all;
  const stems = [...new Set(found.map(stem))];
  const form = (each) => `(?:${(SAME.find((group) => group.includes(each)) ?? [each]).join("|")})${LETTER}*`;
  const words = stems.map((each) => new RegExp(`(?<!${LETTER})${form(each)}`, "giu"));
  const phrase = new RegExp(`(?<!${LETTER})${found.map(stem).map(form).join("[^\\p{L}\\p{N}]{1,3}")}`, "giu");
  return { words, phrase };
}

const count = (pattern, text) => text.match(pattern)?.length ?? 0;

/** How often a word is in a section: in its heading, in its page's title, in its prose, in names of its code, and in its
 * commands. */
const placesOf = (word, [, ...parts], title) => [title, ...parts].map((text) => count(word, text));

/** The part of a heading's words that are of the query: all of "12 · Block tables" or of "server: ..." for these words, half of
 * "A Llama server". */
function shareOf(heading, words) {
  const telling = heading.split(":")[0].match(/\p{L}[\p{L}\p{N}]*/gu)?.filter((word) => !EMPTY.has(word.toLowerCase())) ?? [];
  return telling.filter((each) => words.some((word) => count(word, each))).length / Math.max(1, telling.length);
}

/** How well a section fits that has some of the words. A page that has them often is about them, and most of all the lecture
 * whose number is among them. A word that few sections have tells more than one that most have (`rarity`, 1 on average). */
function scoreOf([, heading, prose], title, { words, phrase }, places, ofPage, rarity) {
  let score = 0;
  if (words.length > 1) score += 15 * Math.min(1, count(phrase, heading)) + 5 * Math.log2(1 + count(phrase, prose));
  const bonus = 6 + 16 * shareOf(heading, words);
  let present = 0;
  for (const [number, word] of words.entries()) {
    const [inTitle, inHeading, inProse, inNames, inCommands] = places[number];
    if (!places[number].some(Boolean)) continue;
    let ofWord = bonus * Math.min(1, inHeading) + 5 * Math.min(1, inTitle) + 3 * Math.log2(1 + inProse);
    ofWord += Math.log2(1 + inNames) + 6 * Math.log2(1 + inCommands) + 3 * Math.log2(1 + ofPage[number]);
    if (/^\d+$/.test(title.match(word)?.[0]) && title.search(word) === 0) ofWord += 20;
    score += rarity[number] * ofWord;
    present += rarity[number];
  }
  return score * (present / words.length);
}

/** How rare each word is, by the number of sections that have it; 1 on average. */
function raritiesOf(numWith, numSections) {
  const logs = numWith.map((number) => Math.log2(1 + numSections / Math.max(1, number)));
  const sum = logs.reduce((total, each) => total + each, 0);
  return logs.map((each) => (each * logs.length) / sum);
}

/** All sections that have some of the words: [{page, title, anchor, heading, prose, names, commands, numWords, score}, ...],
 * the best first. */
function search(pages, patterns) {
  const { words } = patterns;
  const lengths = pages.map(({ sections }) => sections.reduce((sum, [, , prose]) => sum + prose.length, 0));
  const usual = lengths.reduce((sum, each) => sum + each, 0) / pages.length;
  const matching = [];
  let numSections = 0;
  for (const [index, { page, weight, sections }] of pages.entries()) {
    const [[, title]] = sections;
    const counted = sections.map((section) => words.map((word) => placesOf(word, section, title)));
    // A short page has a word as often as a long one if it has it as often per line.
    const share = 0.25 + 0.75 * Math.min(1, lengths[index] / usual);
    const ofPage = words.map((_, number) => counted.reduce((sum, places) => sum + places[number][2], 0) / share);
    matching.push(...sections.map((section, at) => ({ page, title, weight, section, places: counted[at], ofPage })));
    numSections += sections.length;
  }
  const has = ({ places }, number) => places[number].some(Boolean);
  const rarity = raritiesOf(words.map((_, number) => matching.filter((each) => has(each, number)).length), numSections);
  const found = matching.map((each) => {
    const { page, title, weight, section, places, ofPage } = each;
    const [anchor, heading, prose, names, commands] = section;
    const numWords = words.filter((_, number) => has(each, number)).length;
    const score = weight * scoreOf(section, title, patterns, places, ofPage, rarity);
    return { page, title, anchor, heading, prose, names, commands, numWords, score };
  });
  return found.filter(({ numWords }) => numWords).sort((one, other) => other.score - one.score);
}

/** The best sections that have all words. Where they are few, also those that lack one, then those that lack two, and so on,
 * down to half of the words. */
function closest(pages, patterns) {
  const all = patterns.words.length;
  const found = search(pages, patterns);
  const results = [];
  let numWhole = 0;
  for (let least = all; least >= all / 2 && results.length < ENOUGH; least -= 1) {
    const ofPage = {};
    for (const result of found.filter(({ numWords }) => numWords === least)) {
      ofPage[result.page] = (ofPage[result.page] ?? 0) + 1;
      if (ofPage[result.page] <= MOST_PER_PAGE) results.push(result);
    }
    if (least === all) numWhole = results.length;
  }
  results.sort((one, other) => other.score - one.score);
  return { results, numWhole };
}

/** A piece of text with all matches in it marked. */
function marked(piece, words) {
  const parts = [];
  let told = 0;
  const matches = words.flatMap((word) => [...piece.matchAll(word)]).sort((one, other) => one.index - other.index);
  for (const { index, 0: text } of matches) {
    parts.push(piece.slice(told, index), make("mark", { textContent: text }));
    told = index + text.length;
  }
  return [...parts, piece.slice(told)];
}

/** The first command of a section that matches, or else the words around the first match in its prose. */
function context({ prose, names, commands }, { words, phrase }) {
  const command = commands.split("\n").find((line) => words.some((word) => count(word, line)));
  if (command !== undefined) return make("p", {}, make("code", {}, ...marked(command, words)));
  const first = [phrase, ...words].map((pattern) => prose.search(pattern)).find((at) => at >= 0);
  if (first === undefined) {
    const matching = names.split(" ").filter((name) => words.some((word) => count(word, name)));
    const shown = matching.slice(0, 5).flatMap((name) => [make("code", { textContent: name }), " "]);
    return shown.length ? make("p", {}, "In its code: ", ...shown) : make("p", {}, prose.slice(0, 2 * AROUND));
  }
  const begin = first <= AROUND ? 0 : prose.indexOf(" ", first - AROUND) + 1;
  const end = prose.length <= first + AROUND ? prose.length : prose.lastIndexOf(" ", first + AROUND);
  const piece = prose.slice(begin, Math.max(end, first));
  return make("p", {}, begin ? "… " : "", ...marked(piece, words), end < prose.length ? " …" : "");
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
