/** A burst of demo requests, of such sizes that one sees batching, prefix hits, chunking and preemption. */

import { ask, chunks } from "./api.js";
import { byId, count, setText, showOne } from "./dom.js";

const MOST_TOKENS = 20_000; // what a small model on a CPU computes in a minute or two
const LEAD = 1000; // milliseconds at most by which the first request goes ahead, so that its steps are seen at once
const DEMO_PAUSE = 1500; // milliseconds between bursts of a page that is opened with ?demo
const SHORT_OUTPUT = 100; // of each request, where no burst could fill the pool
const SYSTEM =
  "You are the assistant of a small library by the sea. You answer briefly and politely, you never invent a book, " +
  "and when you do not know something you say so. The library opens at nine and closes at six, on Sundays it is " +
  "closed. Readers may keep a book for three weeks and ask once for three more.\n\n";
const QUESTIONS = [
  "Which book should I read about the stars?",
  "How long may I keep a novel?",
  "Is there a poem about rain?",
  "When do you open tomorrow?",
  "What is a good story for a child of six?",
  "Who wrote about the great whale?",
  "May I bring my dog?",
  "Where do I find maps of the coast?",
];
const PASSAGE =
  "The catalogue lists every volume by its shelf, its author and the year in which it came to the house. In the " +
  "first room stand the travels and the maps, in the second the novels, and in the third, where the window looks " +
  "out on the harbour, the letters of the sailors who once lived here. ";
const QUESTION_TOKENS = 16;
const LONGEST_DOCUMENT = 400; // tokens: on a CPU, a step with more of them takes seconds
const SUMMARY_TOKENS = 16; // what is written about a document

/** Sizes in tokens of a burst of `number` requests, which several engines divide among themselves.
 *
 * `long` of them read a document of `longPrompt` tokens, which takes more than one step's budget if it may be so long;
 * the others share a prefix of `prefix` tokens. `fills`: together they grow beyond the pool, unless that would take
 * far more than a minute. `limit` is the most tokens of one request. */
export function plan(number, settings, limit) {
  const { block_size, num_blocks, token_budget, max_num_seqs, data_parallel_size: engines = 1 } = settings;
  const pool = block_size * num_blocks;
  const room = Math.min(limit, pool);
  const long = Math.max(1, Math.floor(number / 8));
  const prefix = Math.min(Math.max(2 * block_size, 64), Math.floor(room / 4));
  const affordable = Math.floor(MOST_TOKENS / 4 / long);
  const chunked = Math.min(Math.ceil(1.25 * token_budget), LONGEST_DOCUMENT);
  const longPrompt = Math.max(8, Math.min(chunked, Math.floor(room / 2), affordable));
  // Those that run together, the shared prefix counted once, are to want a third more than there is.
  const together = Math.min(Math.ceil((number - long) / engines), max_num_seqs ?? number);
  const wanted = Math.ceil(((4 / 3) * pool - prefix) / together) - QUESTION_TOKENS;
  const most = room - prefix - QUESTION_TOKENS - 1;
  const fills = wanted <= most && number * wanted + long * longPrompt <= MOST_TOKENS;
  const output = Math.max(16, fills ? wanted : Math.min(SHORT_OUTPUT, most));
  return { long, short: number - long, prefix, longPrompt, output, fills };
}

/** The load panel. `onRequests(id, label, first)` is told the ids of the answers, what their requests may be called, and the
 * number of the first one. With ?demo in the page's address, bursts follow one another until they are cancelled. */
export class Load {
  constructor({ onRequests }) {
    this.onRequests = onRequests;
    this.settings = null;
    this.abort = null;
    this.material = null;
    this.repeats = new URLSearchParams(location.search).has("demo");
    byId("load-size").oninput = ({ target }) => setText(byId("load-count"), count(Number(target.value), "request"));
    byId("load").onsubmit = (event) => {
      event.preventDefault();
      this.fire(Number(byId("load-size").value));
    };
    byId("load-stop").onclick = () => {
      this.repeats = false;
      this.abort?.abort();
    };
  }

  /** The engine that is shown has said its settings. */
  begin(settings) {
    this.settings = settings;
    if (this.repeats && settings.live) this.fire(Number(byId("load-size").value));
  }

  /** Send a burst, and count its answers until the last one has ended. */
  async fire(number) {
    if (this.abort || !this.settings) return;
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.counts = { all: number, generating: 0, done: 0, failed: 0 };
    this.hint = this.problem = "";
    this._show();
    try {
      const sizes = plan(number, this.settings, await this._limit(signal));
      if (!sizes.fills) this.hint = this._tooLarge();
      const { documents, chats } = await this._prompts(sizes, signal);
      // The first chat computes the prefix that the others find in the cache. Long documents come last: a step with their
      // tokens takes long. Three requests to the server, not one each: a browser keeps only a handful of connections.
      const groups = [];
      const send = async (label, prompts, output, first) => {
        if (!prompts.length) return;
        await new Promise((resolve) => {
          groups.push(this._group(label, prompts, output, signal, first, resolve).finally(resolve));
          setTimeout(resolve, LEAD);
        });
      };
      await send("#", chats.slice(0, 1), sizes.output, 1);
      await send("#", chats.slice(1), sizes.output, 2);
      await send("doc", documents, SUMMARY_TOKENS, 1);
      await Promise.all(groups);
    } catch (error) {
      if (error.name !== "AbortError") this.problem = error.message;
      this.counts.failed = number - this.counts.done;
    }
    this.abort = null;
    this._show();
    if (!this.problem) this._repeat(number);
  }

  /** Of a page that is opened with ?demo: the next burst, once the page is in sight. */
  _repeat(number) {
    setTimeout(() => {
      if (!this.repeats) return;
      if (document.hidden) this._repeat(number);
      else this.fire(number);
    }, DEMO_PAUSE);
  }

  /** Send prompts as one request, and count what comes back; `onBegin` is called at the first token. */
  async _group(label, prompt, max_tokens, signal, first, onBegin) {
    const begun = new Set();
    let done = 0;
    try {
      const body = { prompt, max_tokens, ignore_eos: true, seed: 1, stream: true };
      const response = await ask("v1/completions", { body, signal });
      for await (const chunk of chunks(response)) {
        if (!begun.size) this.onRequests(chunk.id, label, first);
        for (const { index, finish_reason } of chunk.choices) {
          if (!begun.has(index)) {
            begun.add(index);
            this.counts.generating++;
            onBegin();
          }
          if (finish_reason) {
            done++;
            this.counts.generating--;
            this.counts.done++;
          }
        }
        this._show();
      }
    } catch (error) {
      this.counts.generating -= begun.size - done;
      this.counts.failed += prompt.length - done;
      if (error.name !== "AbortError") this.problem = error.message;
    }
  }

  /** The most tokens that one request may have. */
  async _limit(signal) {
    const models = await (await ask("v1/models", { signal })).json();
    return models.data[0].max_model_len;
  }

  /** Prompts of exactly the planned sizes, as token ids. */
  async _prompts({ long, short, prefix, longPrompt }, signal) {
    this.material ??= await Promise.all([SYSTEM, PASSAGE, ...QUESTIONS].map((text) => tokenize(text, signal)));
    const [system, passage, ...questions] = this.material;
    const mark = Math.floor(Math.random() * 1e6); // a second burst is to find no document in the prefix cache
    const titles = Array.from({ length: long }, (_, i) => tokenize(`Document ${mark}-${i}. `, signal));
    const documents = (await Promise.all(titles)).map((title) => continued(title, passage, longPrompt));
    const beginning = continued([], system, prefix);
    const chats = Array.from({ length: short }, (_, i) => {
      const question = questions[i % questions.length];
      return [...beginning, ...continued(question, passage, QUESTION_TOKENS)];
    });
    return { documents, chats };
  }

  _tooLarge() {
    const { num_blocks, block_size } = this.settings;
    const tokens = (num_blocks * block_size).toLocaleString("en");
    return `A burst cannot fill this pool of ${tokens} tokens. To see preemption: nanovllm serve --num-kv-blocks 96`;
  }

  _show() {
    const { all, generating, done, failed } = this.counts;
    const left = all - generating - done - failed;
    const unfinished = this.problem ? "failed" : "cancelled";
    const parts = [[done, "done"], [generating, "generating"], [left, "without a token yet"], [failed, unfinished]];
    byId("load-progress").hidden = !this.abort;
    if (done) Object.assign(byId("load-progress"), { max: all, value: done });
    else byId("load-progress").removeAttribute("value"); // moves all the same
    const shown = parts.filter(([number, what]) => number || what === "done");
    const text = shown.map(([number, what]) => `${number} ${what}`).join(" · ");
    setText(byId("load-state"), [text, this.problem || this.hint].filter(Boolean).join(". "));
    if (this.abort) showOne(byId("load-stop"), byId("fire"));
    else showOne(byId("fire"), byId("load-stop"));
  }
}

async function tokenize(prompt, signal) {
  const response = await ask("tokenize", { body: { prompt, add_special_tokens: false }, signal });
  return (await response.json()).tokens;
}

/** `tokens`, continued by `more` as often as it takes, `length` in all. */
function continued(tokens, more, length) {
  const found = [...tokens];
  while (found.length < length) found.push(...more);
  return found.slice(0, length);
}
