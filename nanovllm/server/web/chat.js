/** The chat: a conversation with the model, kept over a reload, and what each answer cost. */

import { ask, chunks } from "./api.js";
import { button, byId, count, element, seconds, setText, showOne } from "./dom.js";
import { copyButton, prose } from "./prose.js";

const STORE = "nanovllm.chat";
// Questions that the course model answers right with every setting of the README (tests/server/test_suggestions.py).
const SUGGESTIONS = [
  "What is the capital of Japan?",
  "What is the chemical symbol for water?",
  "What is the capital of England?",
];
// How they are asked, unless the settings say otherwise: the likeliest tokens, and few of them.
const SUGGESTED = { temperature: 0, max_tokens: 32 };
const WELCOME =
  "Ask something, and watch the engine answer: your request gets blocks of the KV pool, grows by one token per step, " +
  "and frees its blocks at the end.";
const REASONS = {
  stop: "complete",
  length: "cut off at the token limit",
  abort: "aborted by the server",
  stopped: "stopped by you",
};

/** The left half of the page.
 *
 * `onAnswer(id)` is told the id of each answer that the server has begun, `onShow(id)` which request the user wants to
 * see in the engine, and `colorOf(id)` says in which colour that is drawn (or undefined).
 *
 * A message is {role, text} and, for an answer, {id, prompt, cached, tokens, first, last, reason, error}:
 * the numbers of the server's `usage`, and seconds from the question to its first and last token. */
export class Chat {
  constructor({ onAnswer, onShow, colorOf }) {
    Object.assign(this, { onAnswer, onShow, colorOf });
    this.messages = [];
    this.nodes = []; // of the page, one a message
    this.abort = null; // of the answer that is being written
    this.editing = false;
    this.list = byId("messages");
    this.field = byId("question");
    this.settings = byId("settings");
    this._listen();
    this._restore();
    this._draw();
  }

  _listen() {
    byId("composer").onsubmit = (event) => {
      event.preventDefault();
      this.send(this.field.value.trim());
    };
    this.field.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(this.field.value.trim());
      } else if (event.key === "Escape" && this.editing) this._edit(false);
    };
    this.field.oninput = () => this._fit();
    byId("stop").onclick = () => this.stop();
    byId("cancel-edit").onclick = () => this._edit(false);
    byId("new-chat").onclick = () => this.reset();
    byId("toggle-settings").onclick = () => this._showSettings(this.settings.hidden);
    this.settings.onsubmit = (event) => event.preventDefault();
    addEventListener("pagehide", () => this._save());
  }

  /** Ask, and write the answer as it comes; after "edit" in place of the last question and its answer.
   *
   * `defaults` are sampling parameters for what the settings leave empty. */
  async send(text, defaults = {}) {
    if (!text || this.abort) return;
    if (!this.settings.checkValidity()) {
      this._showSettings(true);
      return this.settings.reportValidity();
    }
    if (this.editing) {
      this.messages.splice(this._lastQuestion());
      this._edit(false);
    }
    this.field.value = "";
    this._fit();
    const answer = { role: "assistant", text: "" };
    this.messages.push({ role: "user", text }, answer);
    this.abort = new AbortController();
    this._draw();
    this.list.scrollTop = this.list.scrollHeight;
    try {
      await this._receive(answer, this.abort.signal, defaults);
    } catch (error) {
      if (error.name === "AbortError") answer.reason = "stopped";
      else answer.error = error.message;
    }
    this.abort = null;
    this._save();
    this._draw();
    setText(byId("announcer"), answer.error ?? (answer.text || "The answer is empty."));
  }

  /** Abort the answer: the server notices that the connection is closed, and frees its blocks. */
  stop() {
    this.abort?.abort();
  }

  /** Forget the conversation. */
  reset() {
    this.stop();
    this.messages = [];
    this._edit(false);
    this._draw();
    this._save();
    this.field.focus();
  }

  _showSettings(shown) {
    this.settings.hidden = !shown;
    byId("toggle-settings").setAttribute("aria-expanded", String(shown));
  }

  async _receive(answer, signal, defaults) {
    const start = performance.now();
    const body = {
      messages: this._conversation(answer),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...defaults,
      ...this._sampling(),
    };
    const response = await ask("v1/chat/completions", { body, signal });
    for await (const chunk of chunks(response)) {
      if (!answer.id) {
        answer.id = `${chunk.id}-0`; // the engine's name for the request: the answer's id and the prompt's position
        this.onAnswer(chunk.id);
      }
      const [choice] = chunk.choices;
      const news = choice?.delta.content;
      if (news) {
        answer.last = (performance.now() - start) / 1000;
        answer.first ??= answer.last;
        answer.text += news;
      }
      if (choice?.finish_reason) answer.reason = choice.finish_reason;
      if (chunk.usage) this._count(answer, chunk.usage);
      this._redraw(answer);
    }
  }

  _count(answer, usage) {
    answer.prompt = usage.prompt_tokens;
    answer.tokens = usage.completion_tokens;
    answer.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }

  _conversation(answer) {
    const system = this.settings.elements.system.value.trim();
    // A question that got no answer is not asked again: two questions in a row are nothing a model has learnt from.
    const answered = (i) => this.messages[i + 1] === answer || this.messages[i + 1].text;
    const said = (message, i) => (message.role === "user" ? answered(i) : message.text);
    const turns = this.messages.filter(said).map(({ role, text }) => ({ role, content: text }));
    return system ? [{ role: "system", content: system }, ...turns] : turns;
  }

  /** The settings that were given; what is left empty is the server's to choose. */
  _sampling() {
    const names = ["temperature", "top_p", "max_tokens", "seed"];
    const given = names.map((name) => [name, this.settings.elements[name].value]).filter(([, value]) => value !== "");
    return Object.fromEntries(given.map(([name, value]) => [name, Number(value)]));
  }

  /** As high as its text, up to what the style allows. */
  _fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + 2}px`;
  }

  // ------------------------------------------------------------ edit the last question

  _lastQuestion() {
    return this.messages.findLastIndex((message) => message.role === "user");
  }

  _edit(on) {
    this.editing = on;
    byId("editing").hidden = !on;
    this.nodes.forEach((node, i) => node.classList.toggle("replaced", on && i >= this._lastQuestion()));
    if (on) {
      this.field.value = this.messages[this._lastQuestion()].text;
      this.field.focus();
    } else this.field.value = "";
    this._fit();
  }

  // ------------------------------------------------------------ over a reload

  _save() {
    const settings = Object.fromEntries(new FormData(this.settings));
    const kept = { messages: this.messages, settings, draft: this.editing ? "" : this.field.value };
    try {
      sessionStorage.setItem(STORE, JSON.stringify(kept));
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      console.warn("The browser keeps no more of this conversation: a reload will bring back its beginning.");
    }
  }

  _restore() {
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "null");
    if (!kept) return;
    this.messages = kept.messages;
    const answer = this.messages.at(-1);
    if (answer?.role === "assistant" && !answer.reason && !answer.error) answer.reason = "stopped"; // by the reload
    for (const [name, value] of Object.entries(kept.settings)) this.settings.elements[name].value = value;
    this.field.value = kept.draft;
    this._fit();
  }

  // ------------------------------------------------------------ drawing

  /** The whole conversation. */
  _draw() {
    const atEnd = this._isAtEnd();
    this.nodes = this.messages.map((message, i) => this._message(message, i));
    this.list.replaceChildren(...(this.nodes.length ? this.nodes : [this._welcome()]));
    if (this.abort) showOne(byId("stop"), byId("send"));
    else showOne(byId("send"), byId("stop"));
    byId("new-chat").disabled = !this.messages.length;
    this.list.setAttribute("aria-busy", String(this.abort !== null));
    if (atEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Whether the newest line is in sight; who has scrolled up to read is left in peace. */
  _isAtEnd() {
    return this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
  }

  /** Show the colours of requests whose first steps have been seen meanwhile, and no others: a new stream, or that of
   * another engine, does not know the requests of the one before, or draws them in other colours. */
  recolor() {
    this.messages.forEach((message, i) => {
      const shown = this.nodes[i].querySelector(".swatch")?.dataset.color;
      if (!message.id || this.colorOf(message.id) === shown) return;
      // Only the swatch: text may be selected in the rest, or a button have the focus.
      this.nodes[i].querySelector(".swatch")?.remove();
      const swatch = this._swatch(message.id);
      if (swatch) this.nodes[i].querySelector("footer")?.prepend(swatch);
    });
  }

  /** Only an answer that has grown, at most once a frame. */
  _redraw(answer) {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const i = this.messages.indexOf(answer);
      if (i < 0) return; // a new chat was begun meanwhile
      const atEnd = this._isAtEnd();
      this._replace(answer, i);
      if (atEnd) this.list.scrollTop = this.list.scrollHeight;
    });
  }

  _replace(message, i) {
    const node = this._message(message, i);
    this.nodes[i].replaceWith(node);
    this.nodes[i] = node;
  }

  _welcome() {
    const ideas = SUGGESTIONS.map((text) => button(text, () => this.send(text, SUGGESTED)));
    return element("div", { className: "welcome" },
      element("p", {}, WELCOME),
      element("div", { className: "ideas" }, ...ideas));
  }

  _message(message, i) {
    if (message.role === "user") {
      const editable = i === this._lastQuestion() && !this.abort;
      const edit = editable ? button("Edit", () => this._edit(true), { className: "quiet" }) : null;
      return element("article", { className: "question" }, element("p", {}, message.text), edit);
    }
    const writing = this.abort && i === this.messages.length - 1;
    const body = element("div", { className: writing ? "prose writing" : "prose" }, ...prose(message.text));
    const problem = message.error ? element("p", { className: "problem" }, message.error) : null;
    const copy = writing || !message.text ? null : copyButton("Copy", () => message.text);
    return element("article", { className: "answer" }, body, problem, this._readout(message, copy));
  }

  /** What the answer cost, and where it is in the engine. */
  _readout(answer, copy) {
    const facts = [];
    if (answer.tokens) facts.push(["tokens", count(answer.tokens, "token")]);
    if (answer.first !== undefined) facts.push(["ttft", `first token after ${seconds(answer.first)}`]);
    const span = answer.last - answer.first;
    if (answer.tokens > 1 && span > 0) facts.push(["rate", `${((answer.tokens - 1) / span).toFixed(1)} tokens/s`]);
    if (answer.prompt) facts.push(["cached", `${answer.cached} of ${count(answer.prompt, "prompt token")} cached`]);
    if (answer.reason) facts.push(["reason", REASONS[answer.reason] ?? answer.reason]);
    const spans = facts.map(([fact, text]) => element("span", { dataset: { fact } }, text));
    return element("footer", {}, this._swatch(answer.id), ...spans, copy);
  }

  /** The colour of a request, which leads to it; null while the engine's record does not show it. */
  _swatch(id) {
    const color = id && this.colorOf(id);
    if (!color) return null;
    const label = "Show this request in the engine";
    const node = button("", () => this.onShow(id), { className: "swatch", title: label, ariaLabel: label });
    node.dataset.color = color;
    node.style.background = color;
    return node;
  }
}
