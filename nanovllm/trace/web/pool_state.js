// One step of the engine as the reader of a trace sees it, and the state of the pool of blocks that steps
// lead to.

const NOTHING = Object.freeze([]);
const NO_ENTRIES = new Map();
// In `firstSampled`: nothing was sampled. (-1: a token that the reader may not know.)
export const NO_TOKEN = -2;

// One step. `ids`, `starts`, `counts`, `decodes` and `firstSampled` hold the shares column by column, since
// twenty thousand steps of 64 shares would not fit as objects; `requests` makes objects of one step's shares
// for those who read few steps.
export class StepRecord {
  constructor(step, start, duration, size) {
    this.step = step;
    this.start = start;
    this.duration = duration;
    this.ids = size ? new Array(size) : NOTHING;
    this.starts = new Int32Array(size);
    this.counts = new Int32Array(size);
    this.decodes = new Uint8Array(size); // 1: one token beyond the prompt, and drafts
    this.firstSampled = new Int32Array(size).fill(NO_TOKEN);
    this.moreSampled = NO_ENTRIES; // row -> all sampled ids, where a share sampled several
    this.newBlocks = NO_ENTRIES; // row -> blocks appended to the table
    this.drafts = NO_ENTRIES; // row -> how many of the tokens, at the end, are drafts
    this.numTokens = 0; // computed in the step
  }

  get size() {
    return this.ids.length;
  }

  // Number of tokens that the share in this row sampled.
  numSampled(row) {
    if (this.firstSampled[row] === NO_TOKEN) return 0;
    return this.moreSampled.has(row) ? this.moreSampled.get(row).length : 1;
  }

  addShare(row, newBlocks, sampled, drafts = 0) {
    const added = (map, value) => (map === NO_ENTRIES ? new Map() : map).set(row, value);
    if (newBlocks.length) this.newBlocks = added(this.newBlocks, newBlocks);
    if (sampled.length) this.firstSampled[row] = sampled[0];
    if (sampled.length > 1) this.moreSampled = added(this.moreSampled, sampled);
    if (drafts) this.drafts = added(this.drafts, drafts);
  }

  // Drafts of the share in this row that the model confirmed: it sampled them, and one token more.
  numAccepted(row) {
    return Math.min(this.drafts.get(row) ?? 0, Math.max(0, this.numSampled(row) - 1));
  }

  // Drafts of the share in this row that were computed in vain: their slots are written again.
  numRejected(row) {
    return (this.drafts.get(row) ?? 0) - this.numAccepted(row);
  }

  // The tokens of the share in this row by their marks, in order: [mark, number].
  parts(row) {
    const kind = this.decodes[row] ? "decode" : "prefill";
    const drafts = this.drafts.get(row);
    if (!drafts) return [[kind, this.counts[row]]];
    const parts = [[kind, this.counts[row] - drafts]];
    parts.push(["accepted draft", this.numAccepted(row)], ["rejected draft", this.numRejected(row)]);
    return parts.filter(([, number]) => number);
  }

  // Computed tokens that are neither drafts nor of prompts, one for each decoding request.
  get numDecode() {
    return this.decodes.reduce((sum, each) => sum + each, 0);
  }

  get numDrafts() {
    let sum = 0;
    for (const drafts of this.drafts.values()) sum += drafts;
    return sum;
  }

  get numAcceptedDrafts() {
    let sum = 0;
    for (const row of this.drafts.keys()) sum += this.numAccepted(row);
    return sum;
  }

  get requests() {
    return Array.from(this.ids, (id, row) => this.share(row));
  }

  share(row) {
    const token = this.firstSampled[row];
    const sampled = this.moreSampled.get(row) ?? (token === NO_TOKEN ? NOTHING : [token]);
    const newBlocks = this.newBlocks.get(row) ?? NOTHING;
    const kind = this.decodes[row] ? "decode" : "prefill";
    const [id, start, numTokens] = [this.ids[row], this.starts[row], this.counts[row]];
    return { id, start, numTokens, newBlocks, sampled, kind, numDrafts: this.drafts.get(row) ?? 0 };
  }
}

// The pool right after a step was scheduled. `tables` (id -> block ids) and `numTokens` (id -> tokens
// written) describe the requests that hold blocks; `rejected` (id -> number) tells how many tokens behind those are
// drafts that this very step computed in vain. `hits`, `allocated`, `evicted` and `released` are the
// blocks to which it happened in this very step: found in the prefix cache, handed out, handed out although
// their content could still be found, given up by the last holder.
export class PoolState {
  #cachedHeld = new Set(); // their content could be found when a transfer took them
  #ended = new Set(); // their step is over, but their blocks are given up only with the next one
  #holders = null;
  #filled = null;

  constructor(numBlocks, blockSize, caching) {
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.caching = caching;
    this.tables = new Map();
    this.numTokens = new Map();
    this.refCounts = new Int32Array(numBlocks);
    this.cached = new Uint8Array(numBlocks); // 1: free, still cached
    this.held = {}; // id -> block ids, of tables that KV transfers hold
    this.#forgetStep();
  }

  #forgetStep() {
    this.hits = new Set();
    this.allocated = new Set();
    this.evicted = new Set();
    this.released = new Set();
    this.rejected = new Map();
    this.#holders = this.#filled = null;
  }

  copy() {
    const copy = new PoolState(0, this.blockSize, this.caching);
    copy.numBlocks = this.numBlocks;
    copy.tables = new Map(this.tables); // the tables themselves are never changed, only replaced
    copy.numTokens = new Map(this.numTokens);
    copy.rejected = new Map(this.rejected);
    copy.refCounts = this.refCounts.slice();
    copy.cached = this.cached.slice();
    for (const name of ["hits", "allocated", "evicted", "released"]) copy[name] = new Set(this[name]);
    copy.held = this.held;
    copy.#ended = new Set(this.#ended);
    copy.#cachedHeld = new Set(this.#cachedHeld);
    return copy;
  }

  // Go on to the state after the next record.
  advance(record) {
    this.#forgetStep();
    if (record.numBlocks > this.refCounts.length) this.#grow(record.numBlocks);
    // A step can be scheduled before the results of the one before it are there: who ended with those still
    // holds its blocks, and may even be computed once more.
    for (const id of this.#ended) {
      if (record.arrived.includes(id) || !record.running.includes(id)) this.#release(id);
    }
    for (const id of record.finished.keys()) if (!record.ids.includes(id)) this.#release(id);
    for (const id of record.preempted.keys()) this.#release(id);
    if (record.held !== this.held) this.#hold(record.held);
    for (let row = 0; row < record.size; row++) this.#take(record, row);
    if (record.snapshot) this.#replace(record.snapshot);
    for (const row of record.drafts.keys()) this.#reject(record.ids[row], record.numRejected(row));
    for (const id of record.finished.keys()) if (this.tables.has(id)) this.#ended.add(id);
    for (const block of this.released) if (this.refCounts[block]) this.released.delete(block);
    for (const block of this.allocated) this.cached[block] = 0;
    for (const block of this.hits) this.cached[block] = 0;
  }

  #grow(numBlocks) {
    const refCounts = new Int32Array(numBlocks);
    const cached = new Uint8Array(numBlocks);
    refCounts.set(this.refCounts);
    cached.set(this.cached);
    Object.assign(this, { numBlocks, refCounts, cached });
  }

  // What was scheduled for the request ends with so many drafts that are rejected.
  #reject(id, number) {
    if (!number || this.#ended.has(id) || !this.numTokens.has(id)) return;
    this.numTokens.set(id, this.numTokens.get(id) - number);
    this.rejected.set(id, number);
  }

  // Transfers hold these tables now, and those of the record before no longer.
  #hold(held) {
    const before = this.held;
    this.held = held;
    for (const [id, table] of Object.entries(held)) {
      this.#release(id);
      for (const block of table) {
        if (this.cached[block]) this.#cachedHeld.add(block);
        this.cached[block] = 0;
        this.refCounts[block] += 1;
      }
    }
    for (const table of Object.values(before)) {
      this.#drop(table);
      for (const block of table) {
        if (!this.refCounts[block] && this.#cachedHeld.delete(block)) this.cached[block] = 1;
      }
    }
  }

  // Whether only KV transfers hold the block: it is being received, or read by a peer.
  isTransferring(block) {
    return this.refCounts[block] > 0 && this.holders(block).length === 0;
  }

  #take(record, row) {
    const id = record.ids[row];
    const blocks = record.newBlocks.get(row);
    if (!this.#ended.has(id)) this.numTokens.set(id, record.starts[row] + record.counts[row]);
    const admitted = record.admitted.get(id);
    const resumed = record.resumed.includes(id);
    const whole = admitted !== undefined || resumed;
    if (!whole && !blocks) {
      if (!this.tables.has(id)) this.tables.set(id, NOTHING);
      return;
    }
    if (whole) this.#drop(this.tables.get(id) ?? NOTHING);
    const before = whole ? NOTHING : (this.tables.get(id) ?? NOTHING);
    const copied = resumed ? new Set(record.swapIn.map(([, to]) => to)) : null;
    const numFound = Math.floor((resumed ? record.starts[row] : (admitted ?? 0)) / this.blockSize);
    (blocks ?? NOTHING).forEach((block, i) => {
      this.refCounts[block] += 1;
      if (whole && i < numFound && !copied?.has(block)) this.hits.add(block);
      else {
        this.allocated.add(block);
        if (this.cached[block]) this.evicted.add(block);
      }
    });
    this.tables.set(id, before.length ? before.concat(blocks) : (blocks ?? NOTHING));
  }

  #drop(table) {
    for (const block of table) {
      this.refCounts[block] -= 1;
      if (this.refCounts[block] === 0) this.released.add(block);
    }
  }

  #release(id) {
    this.#ended.delete(id);
    const table = this.tables.get(id);
    if (!table) return;
    const numFull = this.caching ? Math.floor((this.numTokens.get(id) ?? 0) / this.blockSize) : 0;
    this.tables.delete(id);
    this.numTokens.delete(id);
    this.#drop(table);
    for (const block of table.slice(0, numFull)) if (!this.refCounts[block]) this.cached[block] = 1;
  }

  #replace({ tables, numTokens, cached }) {
    const before = this.refCounts;
    this.tables = new Map(tables);
    this.numTokens = new Map(numTokens);
    this.refCounts = new Int32Array(this.numBlocks);
    for (const table of [...tables.values(), ...Object.values(this.held)]) {
      for (const block of table) this.refCounts[block] += 1;
    }
    this.cached = new Uint8Array(this.numBlocks);
    for (const block of cached) this.cached[block] = 1;
    for (const id of this.#ended) if (!tables.has(id)) this.#ended.delete(id);
    this.released = new Set();
    before.forEach((count, block) => count && !this.refCounts[block] && this.released.add(block));
  }

  // Requests whose table holds the block.
  holders(block) {
    if (!this.#holders) this.#index();
    return this.#holders[block] ?? NOTHING;
  }

  // Tokens in the block: 0 to the block size. A free block that is still cached is full.
  filled(block) {
    if (!this.#filled) this.#index();
    return this.#filled[block];
  }

  // Slots behind the filled ones in which this step wrote rejected drafts: of the request's `place`-th block, and of a block.
  fadingOf(id, place) {
    const start = Math.max(this.numTokens.get(id) ?? 0, place * this.blockSize);
    const end = (this.numTokens.get(id) ?? 0) + (this.rejected.get(id) ?? 0);
    return Math.max(0, Math.min(end, (place + 1) * this.blockSize) - start);
  }

  fading(block) {
    if (!this.rejected.size) return 0;
    return Math.max(0, ...this.holders(block).map((id) => this.fadingOf(id, this.tables.get(id).indexOf(block))));
  }

  refCount(block) {
    return this.refCounts[block];
  }

  isCached(block) {
    return this.cached[block] === 1 && this.refCounts[block] === 0;
  }

  // Blocks that some request holds.
  get numHeld() {
    let held = 0;
    for (const count of this.refCounts) if (count) held += 1;
    return held;
  }

  #index() {
    this.#holders = new Array(this.numBlocks);
    this.#filled = new Int32Array(this.numBlocks);
    for (let block = 0; block < this.numBlocks; block++) {
      if (this.isCached(block)) this.#filled[block] = this.blockSize;
    }
    for (const [id, table] of this.tables) {
      let left = this.numTokens.get(id) ?? table.length * this.blockSize;
      for (const block of table) {
        const before = this.#holders[block];
        this.#holders[block] = before ? [...before, id] : [id];
        this.#filled[block] = Math.max(this.#filled[block], Math.min(this.blockSize, Math.max(0, left)));
        left -= this.blockSize;
      }
    }
    for (const table of Object.values(this.held)) {
      for (const block of table) if (!this.#holders[block]) this.#filled[block] = this.blockSize;
    }
  }
}
