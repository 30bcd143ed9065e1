// The record of ranks whose devices sleep: in which phase each of them was when. `nanovllm.lab.viz.ranks` writes it. Times
// are picoseconds. Nothing here draws.
import { clamp } from "./views_style.js";
import { shortLabel } from "./history.js";

export const MILLISECOND = 1e9;
export const STATES = { compute: "computes", wait: "waits", communicate: "communicates", read: "receives KV", idle: "has no order" };
// Changes that are closer to each other than this share of the whole time are one moment: no picture tells them apart.
const GRAIN = 1 / 2000;

/**
 * What a player shows as steps are moments here: each time at which a rank begins something else.
 *
 * Attributes: `title`; `rows`, from top to bottom: {name, isLink, spans, orders, answers}, of which a span is {kind, begin,
 * end, step, shares: [[request id, tokens], ...]}; `requests`: id -> {id, number, label}; `duration`; `seen`: the marks that occur.
 */
export class RankHistory {
  first = 0;
  #moments;

  constructor({ title, requests, rows }) {
    this.title = title;
    this.requests = new Map(requests.map(([id, number]) => [id, { id, number, label: shortLabel(id) }]));
    const ids = requests.map(([id]) => id);
    const span = ([kind, begin, end, step, shares]) => {
      return { kind, begin, end, step, shares: shares.map(([row, tokens]) => [ids[row], tokens]) };
    };
    this.rows = rows.map((row) => ({ ...row, spans: row.spans.map(span) }));
    const spans = this.rows.flatMap((row) => row.spans);
    this.duration = Math.max(...spans.map((each) => each.end));
    this.seen = new Set(["order", "answer", ...spans.flatMap(marksOf)]);
    this.#moments = momentsOf(spans, this.duration);
  }

  get length() {
    return this.#moments.length;
  }

  record(index) {
    return { step: index, time: this.#moments[index], size: 1 };
  }

  indexOfStep(step) {
    return clamp(step, 0, this.length - 1);
  }

  /** The last moment at a time or before it. */
  indexAt(time) {
    return Math.max(0, this.#moments.findLastIndex((moment) => moment <= time));
  }

  /** The span of a row at a time; a row without one is idle. */
  spanAt(row, time) {
    return row.spans.find((span) => span.begin <= time && time < span.end);
  }

  /** What a rank begins to do or does, in a word. */
  stateAt(row, time) {
    const span = this.spanAt(row, time);
    if (span) return STATES[span.kind];
    return row.isLink || time >= this.duration ? "" : STATES.idle;
  }

  /** The time of a row by phase. */
  totals(row) {
    const totals = { compute: 0, wait: 0, communicate: 0, read: 0 };
    for (const { kind, begin, end } of row.spans) totals[kind] += end - begin;
    const busy = Object.values(totals).reduce((sum, time) => sum + time, 0);
    return { ...totals, idle: row.isLink ? 0 : this.duration - busy };
  }

  /** "12.3": a time in milliseconds, with three digits of the whole time. */
  inMilliseconds(time) {
    const digits = 2 - Math.floor(Math.log10(this.duration / MILLISECOND));
    return (time / MILLISECOND).toFixed(clamp(digits, 0, 9));
  }
}

/** The marks of a span: how each request's tokens are drawn, or the phase. */
function marksOf({ kind, shares }) {
  const marks = { wait: "waiting", communicate: "communicates", read: "receives KV" };
  if (kind !== "compute") return [marks[kind]];
  return shares.length ? shares.map(([, tokens]) => markOf(tokens)) : ["dummy step"];
}

/** How a share of this many tokens is drawn. */
export function markOf(tokens) {
  return tokens > 1 ? "prefill" : "decode";
}

/** When a rank begins something else. Of changes that follow closely, the last one counts. */
function momentsOf(spans, duration) {
  const changes = [...new Set(spans.flatMap(({ begin, end }) => [begin, end]))].sort((a, b) => a - b);
  const moments = [];
  let begun = -Infinity;
  for (const time of changes) {
    if (time - begun < duration * GRAIN) moments.pop();
    else begun = time;
    moments.push(time);
  }
  return moments;
}

/** The ranks that a text holds. */
export function readRanks(bytes) {
  const ranks = JSON.parse(new TextDecoder().decode(bytes));
  if (ranks?.nanovllm_ranks !== 1) throw new Error("not a record of ranks in format 1");
  return new RankHistory(ranks);
}
