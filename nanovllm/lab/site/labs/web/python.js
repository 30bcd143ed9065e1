// The page's side of the worker: one Python for all labs, a limit on each run, and a new worker after a stop.

export const LIMIT = 10; // seconds without a sign of life

/** `state`: "loading", "ready", "missing" or "failed", with a `reason`; `onChange` is called when it changes. */
export class Python {
  constructor(onChange) {
    this.onChange = onChange;
    this.waiting = new Map(); // requests that have no answer yet
    this.number = 0;
    this.memory = 0; // bytes of the worker's memory after the last answer
    if (typeof WebAssembly === "undefined") {
      this._say("missing", "This browser has no WebAssembly, in which Python runs here.");
    } else {
      this._start();
    }
  }

  _say(state, reason = "") {
    this.state = state;
    this.reason = reason;
    this.onChange();
  }

  _start() {
    this._say("loading");
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this._heard(data);
    this.worker.onerror = (event) => this._say("failed", event.message || "the worker cannot be loaded");
  }

  _heard({ kind, id, answer, news, message, memory }) {
    if (kind === "ready") this._say("ready");
    else if (kind === "failed") this._say("failed", message);
    else if (!this.waiting.has(id)) return;
    else if (kind === "begun") this._limit(id);
    else if (kind === "news") {
      this._limit(id);
      this.waiting.get(id).onNews(JSON.parse(news));
    } else {
      this.memory = memory;
      this._settle(id, JSON.parse(answer));
    }
  }

  /** Ask the driver; resolves to its answer, or to an error after a stop. */
  ask(request, onNews = () => {}) {
    const id = (this.number += 1);
    return new Promise((resolve) => {
      this.waiting.set(id, { resolve, onNews, timer: null });
      this.worker.postMessage({ id, request: JSON.stringify(request) });
    });
  }

  /** End whatever runs, and begin with a new worker. */
  stop(message = "Stopped.") {
    this.worker.terminate();
    for (const id of [...this.waiting.keys()]) this._settle(id, { error: { message } });
    this._start();
  }

  _limit(id) {
    const entry = this.waiting.get(id);
    clearTimeout(entry.timer);
    const words = `Stopped after ${LIMIT} seconds: does a loop in your code never end?`;
    entry.timer = setTimeout(() => this.stop(words), LIMIT * 1000);
  }

  _settle(id, answer) {
    const { resolve, timer } = this.waiting.get(id);
    clearTimeout(timer);
    this.waiting.delete(id);
    resolve(answer);
  }
}
