/** The engine in six figures, or in seven if it drafts tokens. */

import { byId, count, element, setText } from "./dom.js";

const WINDOW = 5; // seconds over which rates are taken

const TILES = {
  running: "Running",
  rate: "Tokens/s",
  drafts: "Acceptance",
  kv: "KV cache",
  hits: "Prefix hits",
  preempted: "Preemptions",
  step: "Step time",
};

/** The figures at a record of a history, as plain numbers.
 *
 * `now` is a moment of the engine's clock in seconds: after its last step time goes on, and rates fall to 0; undefined
 * is the end of the record. `sampled` and `computed` are tokens a second, the latter with those of prompts; `hits` is
 * undefined while no request was admitted, `acceptance` (tokens per verification of drafts) while nothing was drafted,
 * `stepSeconds` and `batch` while nothing was computed. */
export function figuresAt(history, index, now) {
  const record = history.record(index);
  const hasEnded = (id) => history.requests.get(id)?.ended <= index; // false for undefined
  const unfinished = (ids) => ids.filter((id) => !hasEnded(id)).length;
  const running = unfinished(record.running);
  const idle = running + record.waiting.length + record.swapped.length === 0;
  const end = now ?? record.start + record.duration;
  const steps = stepsBefore(history, index, end - WINDOW);
  const span = Math.min(WINDOW, end - history.record(history.first).start) || Infinity;
  // While a step takes longer than the window, the one before it is the best guess of what steps are like.
  const typical = steps.length || idle || !record.size ? steps : [record];
  const mean = (of) => typical.reduce((sum, step) => sum + of(step), 0) / typical.length;
  return {
    running,
    waiting: unfinished(record.waiting),
    swapped: unfinished(record.swapped),
    sampled: history.tokensPerSecond(WINDOW, index, now),
    computed: steps.reduce((sum, step) => sum + step.numTokens, 0) / span,
    held: idle ? 0 : record.numBlocks - record.numFree, // who has ended gives its blocks back with the next record
    blocks: record.numBlocks,
    hits: history.prefixHitRate(index),
    acceptance: history.acceptanceLength(index),
    preemptions: record.sums.preemptions,
    stepSeconds: typical.length ? mean((step) => step.duration) : undefined,
    batch: typical.length ? mean((step) => step.size) : undefined,
  };
}

function stepsBefore(history, index, since) {
  const found = [];
  for (let i = index; i >= history.first; i--) {
    const record = history.record(i);
    if (record.start + record.duration < since) break;
    if (record.size) found.push(record);
  }
  return found;
}

/** The row of tiles on the page. */
export class FigureRow {
  constructor() {
    const tile = ([name, label]) => {
      const value = element("b", {}, "–");
      const note = element("small", {}, "");
      const content = [element("dt", {}, label), element("dd", {}, value, note)];
      const node = element("div", { dataset: { figure: name } }, ...content);
      return [name, { node, value, note }];
    };
    this.tiles = Object.fromEntries(Object.entries(TILES).map(tile));
    byId("figures").replaceChildren(...Object.values(this.tiles).map(({ node }) => node));
  }

  /** The clock of a trace counts seconds, or `unit`, if that is given: a simulation's steps take no real time. */
  useUnit(unit) {
    this.unit = unit;
    setText(this.tiles.rate.node.firstChild, unit ? "Tokens/unit" : TILES.rate);
  }

  _time(span) {
    if (this.unit) return `${Number(span.toPrecision(3))} unit${span === 1 ? "" : "s"}`;
    if (span >= 1) return `${span.toFixed(1)} s`;
    return `${span < 0.01 ? (1000 * span).toFixed(1) : Math.round(1000 * span)} ms`;
  }

  /** Show what `figuresAt` gave. */
  show(now) {
    const share = now.blocks ? now.held / now.blocks : 0;
    const swapped = now.swapped ? `, ${now.swapped} swapped` : "";
    const working = now.stepSeconds !== undefined;
    this._set("running", String(now.running), `${now.waiting} waiting${swapped}`);
    this._set("rate", short(now.sampled), `${short(now.computed)} with prefill`);
    byId("figures").classList.toggle("with-drafts", now.acceptance !== undefined);
    if (now.acceptance !== undefined) this._set("drafts", now.acceptance.toFixed(2), "tokens/verification");
    this._set("kv", percent(share), `${now.held.toLocaleString("en")} of ${count(now.blocks, "block")}`);
    this._set("hits", now.hits === undefined ? "–" : percent(now.hits), "of prompt tokens");
    this._set("preempted", now.preemptions.toLocaleString("en"), "in total");
    if (working) this._set("step", this._time(now.stepSeconds), `average batch ${now.batch.toFixed(1)}`);
    else this._set("step", "–", "idle");
    this.tiles.kv.node.style.setProperty("--share", share);
  }

  _set(name, value, note) {
    setText(this.tiles[name].value, value);
    setText(this.tiles[name].note, note);
  }
}

const percent = (share) => `${share > 0 && share < 0.0995 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
const short = (number) => (number > 0 && number < 10 ? number.toFixed(1) : Math.round(number).toLocaleString("en"));
