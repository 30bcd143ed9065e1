/** The engine as it works: one stream of its steps, from which the figures and the player are drawn. */

import { ServerError, ask, lines } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { FigureRow, figuresAt } from "./figures.js";
import { History, TraceReader } from "./history.js";
import { createPlayer } from "./player.js";
import { DARK, LIGHT, requestColor } from "./views.js";

const KEEP = 20_000; // steps of a live engine that one can scrub back over: some minutes
const FIRST_WAIT = 0.5; // seconds until the stream is asked for again, doubled each time up to
const LONGEST_WAIT = 10;
const REDRAW_EVERY = 200; // milliseconds: figures that change more often cannot be read
const REST_AFTER = 400; // milliseconds without news
const VIEWS = ["pool", "tables", "queues", "budget", "timeline", "usage"];

/** The right half of the page.
 *
 * `onHeader(settings)` is called when a stream begins, `onSteps()` after each batch of steps. */
export class Engine {
  constructor({ onHeader, onSteps }) {
    Object.assign(this, { onHeader, onSteps });
    this.row = new FigureRow();
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.names = new Map(); // id of an answer -> how this page calls its requests
    this.settings = null;
    this.history = null;
    this.player = null;
    this.rank = 0; // which of several engines is shown
    this.reading = null; // ends the stream that is being read
    byId("rank").onchange = ({ target }) => this.choose(Number(target.value));
    setInterval(() => this._tick(), 250);
  }

  /** Call the requests of an answer by a name of this page's own: "you", or a short one followed by numbers from `first` on. */
  name(answerId, label, first = 1) {
    this.names.set(answerId, { label, first });
    for (const request of this.history?.requests.values() ?? []) this._label(request);
    this.player?.changed();
  }

  /** The colour in which a request is drawn, or undefined if its steps were not seen. */
  colorOf(id) {
    const request = this.history?.requests.get(id);
    return request && requestColor(request.number, this.dark.matches ? DARK : LIGHT);
  }

  /** Highlight a request in all views. */
  show(id) {
    this.player?.select({ kind: "request", id });
  }

  /** Show another one of several engines. */
  choose(rank) {
    this.rank = rank;
    if (this.reading) this.reading.abort();
    else this.run(); // nothing is asked for any more: the last stream could not be shown
  }

  /** Follow the engine, for ever; a recorded trace only to its end. What cannot be read or shown is not asked for again. */
  async run() {
    for (let wait = FIRST_WAIT; ; wait = Math.min(2 * wait, LONGEST_WAIT)) {
      let problem = "The server has closed the stream of steps.";
      this.reading = new AbortController();
      const { signal } = this.reading;
      try {
        await this._read(signal, () => (wait = FIRST_WAIT));
        if (this.settings && !this.settings.live) return;
      } catch (error) {
        if (signal.aborted) {
          this._say("waiting", "connecting");
          wait = FIRST_WAIT / 2; // should the other engine's stream fail, too
          continue;
        }
        if (!(error instanceof ServerError)) {
          this._say("broken", `This trace cannot be shown: ${error.message}`);
          this.player?.changed(); // to what came before
          this.reading = null;
          throw error; // for the console, with its place
        }
        problem = error.message;
        if (error.status === 401) return this._locked(error);
        if (error.status === 400) this.rank = 0; // the server has been started anew, with fewer engines
      }
      this._say("broken", `${problem} Trying again.`);
      await new Promise((resolve) => {
        setTimeout(resolve, 1000 * wait);
        signal.addEventListener("abort", resolve);
      });
    }
  }

  async _read(signal, onBegin) {
    const response = await ask(this.rank ? `trace?engine=${this.rank}` : "trace", { signal });
    this.lastNews = performance.now();
    const reader = new TraceReader();
    for await (const batch of lines(response)) {
      for (const line of batch) {
        const { header, record } = reader.readLine(line);
        if (header) {
          this._begin(header.settings);
          onBegin();
        } else this._append(record);
      }
      this.lastNews = performance.now();
      if (!this.settings.live) this._say("reading", "reading the trace");
      this.redraw ??= setTimeout(() => this._redraw(), REDRAW_EVERY);
    }
    if (!this.settings || this.settings.live) return;
    this._redraw();
    this._say("replay", "replay");
  }

  _redraw() {
    clearTimeout(this.redraw);
    this.redraw = null;
    this.player.changed();
    this._figures();
    this.onSteps();
  }

  /** A new stream has no memory of the one before: the server may be another one. */
  _begin(settings) {
    const live = Boolean(settings.live);
    this.settings = settings;
    this.row.useUnit(settings.time_unit);
    this.history = new History(settings, { keep: live ? KEEP : Infinity });
    this.rested = false; // whether the newest record is one of `_rest`
    this.player ??= createPlayer(byId("player"), { views: VIEWS, live, theme: "auto", keysFrom: document, onStep: () => this._figures() });
    this.player.setHistory(this.history);
    if (live) this._say("live", "connected");
    this._showChoice(settings);
    this.onHeader(settings);
  }

  _showChoice({ live, data_rank, data_parallel_size: size = 1 }) {
    byId("rank-choice").hidden = !live || size === 1;
    const options = Array.from({ length: size }, (_, i) => element("option", { value: i }, `Engine ${i}`));
    if (byId("rank").length !== size) byId("rank").replaceChildren(...options); // else it may be open just now
    byId("rank").value = data_rank ?? 0;
    setText(byId("rank-note"), `Figures and pictures show this engine. Chat and demo load go to all ${size} engines.`);
  }

  _append(record) {
    // With asynchronous scheduling an ended request is computed once more: no news after its blocks were given back.
    const late = record.size > 0 && record.ids.every((id) => this._hasEnded(id));
    if (late && this.rested && !record.snapshot && !record.arrived.length) return;
    this.rested = false;
    this.history.append(record);
    for (const [id] of record.named) this._label(this.history.requests.get(id));
  }

  _label(request) {
    // The engine calls the requests of one answer by its id, "-" and a number.
    const [, answer, number] = request.id.match(/^(.*)-(\d+)$/) ?? [];
    const { label, first } = this.names.get(answer) ?? {};
    if (label) request.label = label === "you" ? label : `${label}${Number(number) + first}`;
  }

  _tick() {
    if (this.settings?.live && performance.now() - this.lastNews > REST_AFTER) this._rest();
    this._figures();
  }

  /** After the last request has ended no step comes that would show its blocks given back; this record does it. */
  _rest() {
    const last = this.history.record(this.history.length - 1);
    if (!last?.size || [...last.running, ...last.waiting, ...last.swapped].some((id) => !this._hasEnded(id))) return;
    const reader = new TraceReader();
    reader.readLine(JSON.stringify({ nanovllm_trace: 2, settings: this.settings }));
    const { step, numBlocks, numEvictions } = last;
    const pool = { num_blocks: numBlocks, num_free_blocks: numBlocks, num_evictions: numEvictions };
    const rest = { step: step + 1, start: last.start + last.duration, token_budget: this.settings.token_budget, ...pool };
    this.history.append(reader.readLine(JSON.stringify(rest)).record);
    this.rested = true;
    this.player.changed();
  }

  _hasEnded(id) {
    return this.history.requests.get(id)?.ended !== undefined;
  }

  /** At the record that the player shows; at the newest one of a live engine, as of this moment. */
  _figures() {
    const { history, player } = this;
    if (!history || history.length === history.first || document.hidden) return;
    const end = history.record(history.length - 1);
    const now = end.start + end.duration + (performance.now() - this.lastNews) / 1000;
    const index = player.following ? history.length - 1 : player.index;
    this.row.show(figuresAt(history, index, player.following ? now : undefined));
  }

  _say(state, text) {
    byId("connection").dataset.state = state;
    setText(byId("connection"), text);
  }

  _locked(error) {
    this._say("locked", error.message);
    byId("open-key").hidden = false;
    byId("open-key").onclick = () => {
      byId("open-key").hidden = true;
      this.run();
    };
  }
}
