// The record of an engine at work: reading it line by line (trace format 2), and what follows from it about
// requests and blocks. Nothing here draws. Records and states are to be read, never changed.
import { NO_TOKEN, PoolState, StepRecord } from "./pool_state.js";

const NO_IDS = Object.freeze([]);
const NO_PAIRS = new Map();
const NO_TABLES = Object.freeze({});
const KEYFRAME_EVERY = 64;
// An ended request may still stand in the next line or two: it is computed once more, or said to have ended again.
const LINES_AFTER_END = 8;

// Decodes trace format 2. `readLine` returns {header} for the first line and {record} for every other; it
// throws an Error that says what is wrong and in which line.
export class TraceReader {
  #line = 0;
  #settings = null;
  #names = new Map(); // number -> {id, promptTokens}
  #ended = []; // [line, number] of requests whose names are still known
  #last = { waiting: NO_IDS, running: NO_IDS, swapped: NO_IDS, held: NO_TABLES, num_free_blocks: 0, num_evictions: 0 };

  readLine(text) {
    this.#line += 1;
    let line;
    try {
      line = JSON.parse(text);
    } catch (error) {
      const what = `not JSON (${error.message}); was the file cut off?`;
      throw this.#error(this.#settings ? what : "not a nanovllm trace");
    }
    if (!this.#settings) return { header: this.#header(line) };
    if (!Number.isInteger(line?.step)) throw this.#error("not a step record");
    return { record: this.#record(line) };
  }

  #error(what) {
    return new Error(`line ${this.#line} of the trace: ${what}`);
  }

  #header(line) {
    const version = line?.nanovllm_trace;
    if (version === undefined) throw this.#error("not a nanovllm trace: the first line must name the format");
    if (version !== 2) throw this.#error(`the trace has format ${version}; this page reads format 2`);
    const settings = line.settings;
    for (const name of ["block_size", "num_blocks"]) {
      if (!Number.isInteger(settings?.[name])) throw this.#error(`the settings lack ${name}`);
    }
    this.#settings = settings;
    this.#last.num_blocks = settings.num_blocks;
    this.#last.token_budget = settings.token_budget ?? 0;
    return line;
  }

  #record(line) {
    const shares = this.#list(line, "requests");
    const [start, duration] = [this.#number(line.start), this.#number(line.duration)];
    const record = new StepRecord(line.step, start, duration, shares.length);
    if (line.snapshot) this.#names.clear(); // its line names all that it speaks of
    while (this.#ended[0]?.[0] < this.#line - LINES_AFTER_END) this.#names.delete(this.#ended.shift()[1]);
    for (const entry of this.#list(line, "named")) {
      const [number, id, promptTokens] = Array.isArray(entry) ? entry : [];
      if (!Number.isInteger(number) || typeof id !== "string") throw this.#error("damaged names of requests");
      this.#names.set(number, { id, promptTokens });
    }
    record.named = line.named ? line.named.map(([, id, promptTokens]) => [id, promptTokens]) : NO_IDS;
    shares.forEach((share, row) => this.#share(record, row, share));
    record.arrived = this.#ids(line.arrived);
    record.resumed = this.#ids(line.resumed);
    for (const name of ["admitted", "preempted", "finished", "prompts", "text"]) {
      record[name] = this.#map(line, name);
    }
    for (const [number] of this.#list(line, "finished")) this.#ended.push([this.#line, number]);
    record.swapOut = this.#list(line, "swap_out");
    record.swapIn = this.#list(line, "swap_in");
    record.blockedBy = line.blocked_by ?? "";
    for (const name of ["waiting", "running", "swapped"]) {
      if (line[name] !== undefined) this.#last[name] = this.#ids(line[name]);
      record[name] = this.#last[name];
    }
    for (const name of ["num_free_blocks", "num_blocks", "num_evictions", "token_budget"]) {
      if (line[name] !== undefined) this.#last[name] = this.#number(line[name]);
    }
    if (line.held !== undefined) this.#last.held = line.held;
    record.held = this.#last.held; // id -> table, of blocks that KV transfers hold
    record.numFree = this.#last.num_free_blocks;
    record.numBlocks = this.#last.num_blocks;
    record.numEvictions = this.#last.num_evictions;
    record.tokenBudget = this.#last.token_budget;
    record.snapshot = line.snapshot ? this.#snapshot(line.snapshot) : null;
    return record;
  }

  #share(record, row, share) {
    const short = share?.length === 3;
    const damaged = () => this.#error("a damaged share of a request");
    if (!Array.isArray(share) || (!short && share.length !== 5 && share.length !== 6)) throw damaged();
    const known = this.#known(share[0]);
    const count = short ? 1 : share[2];
    const drafts = share[5] ?? 0;
    if (![share[1], count, drafts].every(Number.isInteger)) throw damaged();
    record.ids[row] = known.id;
    record.starts[row] = share[1];
    record.counts[row] = count;
    record.numTokens += count;
    record.decodes[row] = count - drafts === 1 && share[1] >= known.promptTokens ? 1 : 0;
    if (short) {
      record.firstSampled[row] = share[2];
      return;
    }
    const [, , , blocks, sampled] = share;
    if (!Array.isArray(blocks) || !Array.isArray(sampled)) throw damaged();
    record.addShare(row, blocks, sampled, drafts);
  }

  #snapshot({ tables = [], num_tokens = [], cached = [], num_preemptions }) {
    const named = (pairs) => new Map(pairs.map(([number, value]) => [this.#known(number).id, value]));
    return { tables: named(tables), numTokens: named(num_tokens), cached, numPreemptions: num_preemptions };
  }

  #known(number) {
    const known = this.#names.get(number);
    if (!known) throw this.#error(`request ${JSON.stringify(number)} was not named by any line before`);
    return known;
  }

  #number(value = 0) {
    if (typeof value !== "number") throw this.#error(`${JSON.stringify(value)} is not a number`);
    return value;
  }

  #list(line, name) {
    const value = line[name] ?? NO_IDS;
    if (!Array.isArray(value)) throw this.#error(`${name} is not a list`);
    return value;
  }

  #ids(numbers) {
    if (numbers === undefined || numbers.length === 0) return NO_IDS;
    if (!Array.isArray(numbers)) throw this.#error("damaged list of requests");
    return numbers.map((number) => this.#known(number).id);
  }

  #map(line, name) {
    const pairs = this.#list(line, name);
    return pairs.length ? new Map(pairs.map(([number, value]) => [this.#known(number).id, value])) : NO_PAIRS;
  }
}

// A name short enough for a row: of an HTTP request's id, such as cmpl-5c1e35ab77d94d0b-12, the beginning and the number
// behind it. `digits` is the length of the beginning.
export function shortLabel(id, digits = 4) {
  const bare = id.replace(/^(chatcmpl|cmpl)-/, "");
  const [, beginning, number] = bare.match(/^(\w+).*?(-\d+)?$/) ?? [];
  return bare.length <= 12 || !beginning ? bare : `${beginning.slice(0, digits)}${number ?? "…"}`;
}

// All records read so far, and what follows from them. Indices count records from the first one ever appended
// and never shift: those from `first` to `length - 1` are kept, at least the last `keep` of them. So the
// newest is always `record(length - 1)`, and nothing is there while `length === first`.
export class History {
  #records = [];
  #keyframes = []; // states after the records first, first + KEYFRAME_EVERY, ...
  #recent = new Map(); // index -> state
  #tail;
  #blockEvents = new Map(); // block -> [index, what, index, what, ...]
  #labels = new Map(); // label -> id of its request
  #numNamed = 0;
  #numQueried = 0; // tokens of admitted requests, for which the prefix cache was asked

  constructor(settings, { keep = Infinity } = {}) {
    this.settings = settings;
    this.blockSize = settings.block_size;
    this.keep = keep;
    this.first = 0;
    this.length = 0;
    this.requests = new Map();
    this.peakEntries = 0; // most table entries at a time
    this.peakLengths = NO_IDS; // lengths of the tables at that time
    this.peakHolders = 0; // most requests with a table at a time
    this.usedBlocks = new Set(); // blocks that were ever held or had content in the prefix cache
    this.seen = new Set(); // of "cached", "preempted", "swapped", "held", "aborted", "drafts": what a legend has to explain
    const caching = settings.enable_prefix_caching ?? true;
    this.#tail = new PoolState(settings.num_blocks, settings.block_size, caching);
  }

  record(index) {
    return this.#records[index - this.first];
  }

  append(record) {
    const index = this.length;
    this.#tail.advance(record);
    if (index % KEYFRAME_EVERY === 0) this.#keyframes.push(this.#tail.copy());
    this.#records.push(record);
    this.length += 1;
    this.#noteRequests(record, index);
    this.#noteBlocks(record, index);
    this.#noteSums(record, this.record(index - 1));
    if (this.length - this.first >= this.keep + KEYFRAME_EVERY) this.#forget();
  }

  // The pool after the record was scheduled.
  stateAt(index) {
    if (!(index >= this.first && index < this.length)) throw new RangeError(`no record ${index} is kept`);
    let state = this.#recent.get(index);
    if (state) return state;
    let from = index - (index % KEYFRAME_EVERY);
    for (const known of this.#recent.keys()) if (known > from && known < index) from = known;
    const keyframe = this.#keyframes[(from - this.first) / KEYFRAME_EVERY];
    state = (this.#recent.get(from) ?? keyframe).copy();
    for (let i = from + 1; i <= index; i++) state.advance(this.record(i));
    this.#recent.set(index, state);
    if (this.#recent.size > 8) this.#recent.delete(this.#recent.keys().next().value);
    return state;
  }

  // ---------------------------------------------------------------- what a record says

  #info(id, anew = false) {
    let info = this.requests.get(id);
    if (!info || anew) {
      const number = info?.number ?? this.#numNamed++;
      info = {
        id, number, label: info?.label ?? this.#freeLabel(id), prompt: "", text: "",
        promptTokens: 0, cachedTokens: undefined, outputTokens: 0, outputBefore: 0, peakBlocks: 0,
        firstSeen: this.length - 1, arrived: undefined, firstToken: undefined, lastToken: undefined,
        ended: undefined, reason: undefined, // no reason: the end was missed
        betweenSteps: false, aborted: false,
        preemptions: [], events: [],
      };
      this.requests.set(id, info);
    }
    return info;
  }

  // A label that no other request has.
  #freeLabel(id) {
    let digits = 4;
    while (this.#labels.get(shortLabel(id, digits)) !== undefined && digits < id.length) digits += 2;
    const label = shortLabel(id, digits);
    this.#labels.set(label, id);
    return label;
  }

  #noteRequests(record, index) {
    const note = (info, what) => info.events.push({ index, step: record.step, what });
    for (const id of record.arrived) {
      const info = this.#info(id, this.requests.get(id)?.ended !== undefined); // an id can be used again
      info.arrived = index;
      note(info, "arrived");
    }
    const infos = Array.from(record.ids, (id) => this.#info(id)); // before other names: in order
    for (const [id, promptTokens] of record.named) {
      const info = this.#info(id);
      info.promptTokens = promptTokens || info.promptTokens; // 0: named after the end
    }
    if (record.snapshot) this.#noteSnapshot(record, index, note);
    for (const [id, cached] of record.admitted) {
      const row = record.ids.indexOf(id);
      const known = row < 0 ? 0 : record.starts[row] + record.counts[row];
      this.#noteAdmission(this.#info(id), cached, known, note);
    }
    if (record.swapped.length) this.seen.add("swapped");
    if (record.drafts.size) this.seen.add("drafts");
    if (Object.keys(record.held).length) this.seen.add("held");
    for (const id of record.resumed) note(this.#info(id), "resumed: its blocks are copied back from host memory");
    for (const [id, mode] of record.preempted) {
      this.#info(id).preemptions.push(index);
      this.seen.add("preempted");
      const where = mode === "swap" ? "are copied to host memory" : "are freed";
      note(this.#info(id), `preempted: its blocks ${where}`);
    }
    infos.forEach((info, row) => {
      if (record.numSampled(row) && info.ended === undefined) {
        // Who starts to read in mid-course meets requests that had theirs long before.
        if (record.starts[row] + record.counts[row] === info.promptTokens) {
          info.firstToken = index;
          note(info, "first token");
        }
        info.lastToken = index;
        info.outputTokens = this.#outputAfter(record, row, info);
      }
      if (record.newBlocks.has(row)) {
        info.peakBlocks = Math.max(info.peakBlocks, this.#tail.tables.get(info.id)?.length ?? 0);
      }
    });
    for (const [id, reason] of record.finished) {
      const info = this.#info(id);
      if (info.ended !== undefined) continue;
      const betweenSteps = !record.ids.includes(id); // a stop string, which only the front end sees, or an abort
      Object.assign(info, { ended: index, reason, betweenSteps, aborted: betweenSteps && reason !== "stop" });
      if (info.aborted) this.seen.add("aborted");
      note(info, betweenSteps ? `ended between steps: ${reason}` : `finished: ${reason}`);
    }
    for (const [id, prompt] of record.prompts) this.#info(id).prompt = prompt;
    for (const [id, text] of record.text) this.#info(id).text += text;
  }

  // Tokens of a request's answer once a share has sampled: it computed all but those that it sampled, and drafts.
  #outputAfter(record, row, info) {
    const known = record.starts[row] + record.counts[row] - (record.drafts.get(row) ?? 0);
    return known + record.numSampled(row) - info.promptTokens;
  }

  // Whatever was not seen of the steps before: how far the requests are, and who has ended.
  #noteSnapshot(record, index, note) {
    for (const [id, computed] of record.snapshot.numTokens) {
      const info = this.#info(id);
      // All of its tokens are computed but the newest one; this step's share has not sampled yet, and its drafts are no tokens yet.
      const row = record.ids.indexOf(id);
      const least = computed - info.promptTokens + (row < 0 ? 1 : -(record.drafts.get(row) ?? 0));
      if (computed >= info.promptTokens) info.outputTokens = Math.max(info.outputTokens, least);
      if (info.firstSeen === index) info.outputBefore = info.outputTokens;
    }
    const live = new Set([...record.named.map(([id]) => id), ...record.finished.keys()]);
    const afterGap = record.step > this.record(index - 1)?.step + 1;
    for (const info of this.requests.values()) {
      if (afterGap && live.has(info.id)) info.text = ""; // told anew from its beginning
      if (info.ended !== undefined || live.has(info.id)) continue;
      info.ended = index;
      note(info, "has ended, in steps that are not recorded");
    }
  }

  // `known`: tokens up to the end of the share that admits it, where its answer so far was not seen.
  #noteAdmission(info, cached, known, note) {
    if (info.cachedTokens === undefined) info.cachedTokens = cached;
    if (cached) this.seen.add("cached");
    this.#numQueried += Math.max(info.promptTokens + info.outputTokens, known);
    const again = info.preemptions.length ? "admitted again" : "admitted";
    note(info, cached ? `${again}, ${cached} tokens from the prefix cache` : again);
  }

  #noteBlocks(record, index) {
    const { hits, allocated, evicted, released, tables } = this.#tail;
    const note = (block, what) => {
      const events = this.#blockEvents.get(block);
      if (events) events.push(index, what);
      else this.#blockEvents.set(block, [index, what]);
    };
    for (const block of released) note(block, "released");
    for (const block of hits) note(block, "hit");
    for (const blocks of [hits, allocated, ...Object.values(record.held)]) for (const block of blocks) this.usedBlocks.add(block);
    for (const block of allocated) note(block, evicted.has(block) ? "evicted" : "allocated");
    if (record.snapshot) {
      for (let block = 0; block < this.#tail.numBlocks; block++) {
        if (this.#tail.refCount(block) || this.#tail.isCached(block)) this.usedBlocks.add(block);
      }
    }
    let entries = 0;
    for (const table of tables.values()) entries += table.length;
    if (entries > this.peakEntries) {
      this.peakEntries = entries;
      this.peakLengths = Array.from(tables.values(), (table) => table.length);
    }
    this.peakHolders = Math.max(this.peakHolders, tables.size);
  }

  // Sums since the beginning, so that any window is the difference of two; of preemptions, since the engine started.
  #noteSums(record, previous) {
    const sums = { ...(previous?.sums ?? { sampled: 0, hit: 0, queried: 0, preemptions: 0, verified: 0, accepted: 0 }) };
    for (let row = 0; row < record.size; row++) sums.sampled += record.numSampled(row);
    for (const cached of record.admitted.values()) sums.hit += cached;
    sums.queried = this.#numQueried;
    // A reader that starts, or missed steps, learns the engine's total from the snapshot; a trace of an older version has none.
    sums.preemptions = record.snapshot?.numPreemptions ?? sums.preemptions + record.preempted.size;
    sums.verified += record.drafts.size;
    sums.accepted += record.numAcceptedDrafts;
    record.sums = sums;
  }

  // Drop the oldest records, up to a keyframe, and what only they told.
  #forget() {
    const target = this.length - this.keep;
    const first = target - (target % KEYFRAME_EVERY);
    this.#records.splice(0, first - this.first);
    this.#keyframes.splice(0, (first - this.first) / KEYFRAME_EVERY);
    for (const index of this.#recent.keys()) if (index < first) this.#recent.delete(index);
    this.first = first;
    // With asynchronous scheduling the first record may still show a request that ended in the one before.
    const record = this.record(first);
    const shown = new Set([...record.ids, ...record.running, ...this.stateAt(first).tables.keys()]);
    for (const [id, info] of this.requests) if (info.ended < first && !shown.has(id)) this.requests.delete(id);
    for (const [label, id] of this.#labels) if (!this.requests.has(id)) this.#labels.delete(label);
    for (const events of this.#blockEvents.values()) {
      let gone = 0;
      while (gone < events.length && events[gone] < first) gone += 2;
      events.splice(0, gone);
    }
  }

  // ---------------------------------------------------------------- figures

  // Index of the last record whose step is not after this one: of those with one number, it is the one that computes.
  indexOfStep(step) {
    let [low, high] = [this.first, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.record(middle).step <= step) low = middle + 1;
      else high = middle;
    }
    return Math.max(this.first, low - 1);
  }

  // Index of the first kept record that began at `time` (in the trace's seconds) or later; `length` if none
  // did.
  indexAt(time) {
    let low = this.first;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.record(middle).start < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  #end(index) {
    const record = this.record(index);
    return record.start + record.duration;
  }

  // Sampled tokens a second, over the last `seconds` before `now` (by default the end of the record; a page
  // whose engine has been idle since says what time it is).
  tokensPerSecond(seconds = 5, index = this.length - 1, now = undefined) {
    if (index < this.first || index >= this.length) return 0;
    const end = now ?? this.#end(index);
    const from = Math.min(index + 1, this.indexAt(end - seconds));
    const span = Math.min(seconds, end - this.record(this.first).start);
    const before = this.record(from - 1)?.sums.sampled ?? 0;
    return span > 0 ? (this.record(index).sums.sampled - before) / span : 0;
  }

  // Share of the tokens of admitted requests that was found in the prefix cache, up to the record; undefined
  // if no request was admitted.
  prefixHitRate(index = this.length - 1) {
    const { hit, queried } = this.record(index)?.sums ?? {};
    return queried ? hit / queried : undefined;
  }

  // Tokens that requests got per verification of their drafts, on average up to the record; undefined without drafts.
  acceptanceLength(index = this.length - 1) {
    const { verified, accepted } = this.record(index)?.sums ?? {};
    return verified ? 1 + accepted / verified : undefined;
  }

  // ---------------------------------------------------------------- stories

  // What became of a block up to the record, newest last (at most `most` entries).
  blockStory(block, index, most = 8) {
    const state = this.stateAt(index);
    const events = this.#blockEvents.get(block) ?? [];
    const history = [];
    for (let i = 0; i < events.length && events[i] <= index; i += 2) history.push([events[i], events[i + 1]]);
    return {
      holders: state.holders(block),
      filled: state.filled(block),
      refCount: state.refCount(block),
      cached: state.isCached(block),
      history: history.slice(-most).map(([at, what]) => this.#tell(block, at, what)),
    };
  }

  #tell(block, index, what) {
    const record = this.record(index);
    const takers = record.ids.filter((id, row) => record.newBlocks.get(row)?.includes(block));
    const names = takers.map((id) => this.requests.get(id)?.label ?? shortLabel(id)).join(", ");
    if (what === "released") return `step ${record.step}: freed by its last request`;
    if (what === "hit") return `step ${record.step}: found in the prefix cache by ${names}`;
    return `step ${record.step}: allocated to ${names}${what === "evicted" ? ", evicts cached content" : ""}`;
  }

  // What is known about a request at the record; times in the unit of the trace (seconds, or
  // settings.time_unit).
  requestStory(id, index) {
    const info = this.requests.get(id);
    if (!info) return undefined;
    const state = this.stateAt(index);
    const known = (at) => at !== undefined && at <= index && at >= this.first;
    const arrival = known(info.arrived) ? this.record(info.arrived).start : undefined;
    const until = (at) => (arrival !== undefined && known(at) ? this.#end(at) - arrival : undefined);
    const numOutput = info.lastToken <= index ? info.outputTokens : this.#outputUpTo(info, index);
    return {
      ...info,
      queue: this.#queueOf(info, index),
      outputTokens: numOutput,
      computedTokens: state.numTokens.get(id) ?? 0,
      blocks: state.tables.get(id) ?? NO_IDS,
      timeToFirstToken: until(info.firstToken),
      latency: until(info.ended),
      numPreemptions: info.preemptions.filter((at) => at <= index).length,
      events: info.events.filter((event) => event.index <= index),
    };
  }

  #outputUpTo(info, index) {
    for (let at = Math.min(index, info.ended ?? index); at >= Math.max(this.first, info.firstSeen); at--) {
      const record = this.record(at);
      const row = record.ids.indexOf(info.id);
      if (row >= 0 && record.numSampled(row)) return this.#outputAfter(record, row, info);
    }
    return info.outputBefore;
  }

  // Where the request stands: "to come", "waiting", "running", "swapped" or "ended".
  #queueOf(info, index) {
    const record = this.record(index);
    for (const name of ["running", "waiting", "swapped"]) if (record[name].includes(info.id)) return name;
    if (record.ids.includes(info.id)) return "running";
    return (info.arrived ?? info.firstSeen) > index ? "to come" : "ended";
  }
}
