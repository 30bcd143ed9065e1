// The story of a step, a request or a block in words: what the player shows beside its pictures.
import { requestColor } from "./views.js";
import { whyNotAdmitted, lowerLimit } from "./views_steps.js";
import { inDigits, tokensByKind } from "./views_style.js";

const ENDINGS = { stop: "complete (stop)", length: "at its token limit (length)", abort: "aborted" };
/** A new element with attributes and a text. */
export function makeElement(tag, attributes = {}, text = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

/** "1 token", "2 tokens". */
export function countOf(number, noun) {
  return `${inDigits(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A finish reason; there is none for a request that ended unseen. */
function inWords(reason) {
  return ENDINGS[reason] ?? reason ?? "before this step";
}

/** A time span in the units of the trace. */
function inTime(history, span) {
  const unit = history.settings.time_unit;
  if (unit) return countOf(Number(span.toPrecision(3)), unit.replace(/s$/, ""));
  return span < 1 ? `${Number((span * 1000).toPrecision(3))} ms` : `${Number(span.toPrecision(3))} s`;
}

/** What becomes of a preempted request, by the mode of its preemption. */
function tellPreemption(mode, { enable_prefix_caching }) {
  if (mode === "swap") return "loses its blocks, whose content is copied to host memory, and back before it runs again";
  const kept = enable_prefix_caching === false ? "" : ", except for tokens that are still in the prefix cache then";
  return `loses its blocks and waits; when it is admitted again, the engine computes its prompt and its output so far again${kept}`;
}

/** One step in a sentence, for readers who do not see the pictures. */
export function describeStep(history, index) {
  const record = history.record(index);
  const parts = [
    `step ${record.step}: ${countOf(record.size, "request")} computed`,
    `${tokensByKind(record)} of ${record.tokenBudget} tokens${lowerLimit(history, record)}`,
    `${record.waiting.length} waiting`,
    `${record.numFree} of ${countOf(record.numBlocks, "block")} free`,
  ];
  if (record.preempted.size) parts.push(`${record.preempted.size} preempted`);
  return parts.join(", ");
}

export class StoryPanel {
  /** `select(selection)` and `seek(index)` are called when the reader presses a name or a step. */
  constructor(select, seek) {
    this.select = select;
    this.seek = seek;
    this.content = makeElement("div", { class: "nv-story-content" });
    this.element = makeElement("aside", { class: "nv-story", tabindex: -1,"aria-label": "Details of what is selected" });
    this.element.append(this.content);
    this.actions = new WeakMap(); // of the buttons
    // The panel is made anew with every picture: a press must count although its button may be gone at the release.
    this.content.addEventListener("pointerdown", (event) => event.button === 0 && this._press(event));
    this.content.addEventListener("click", (event) => event.detail === 0 && this._press(event)); // by keyboard
  }

  _press(event) {
    const button = event.target.closest("button");
    if (!button) return;
    event.preventDefault();
    this.actions.get(button)();
  }

  /** Tell of a region {kind, id or index}, or, without one, of the step at the index. */
  show(history, index, region, theme) {
    Object.assign(this, { history, index, theme });
    this.parts = [];
    if (history.length === history.first) this._tellNothing();
    else this._tell(region);
    const focused = [...this.content.querySelectorAll("button")].indexOf(document.activeElement);
    this.content.replaceChildren(...this.parts);
    if (focused < 0) return;
    const buttons = this.content.querySelectorAll("button");
    (buttons[Math.min(focused, buttons.length - 1)] ?? this.element).focus({ preventScroll: true });
  }

  _tell(region) {
    if (region?.kind === "request" && this.history.requests.has(region.id)) this._tellRequest(region.id);
    else if (region?.kind === "block") this._tellBlock(region.id);
    else this._tellStep(region?.kind === "step" ? region.index : this.index);
  }

  _tellNothing() {
    this._title("No step yet");
    this._say("The steps of the engine appear here as soon as it computes.");
  }

  // ---------------------------------------------------------------- a step

  _tellStep(index) {
    const { history } = this;
    const record = history.record(index);
    this._title(`Step ${record.step}`);
    this._facts([
      ["tokens", `${inDigits(record.numTokens)} of at most ${inDigits(record.tokenBudget)}${lowerLimit(history, record)}`],
      ["of these", record.numTokens && tokensByKind(record)],
      ["accepted", record.numDrafts && `${record.numAcceptedDrafts} of ${countOf(record.numDrafts, "draft")}`],
      ["duration", record.duration && history.settings.time_unit !== "steps" && inTime(history, record.duration)],
      ["blocks", `${inDigits(record.numBlocks - record.numFree)} of ${inDigits(record.numBlocks)} held`],
      ["arrived", this._chips(record.arrived)],
      ["admitted", this._chips(record.admitted.keys(), (id) => this._cachedNote(record.admitted.get(id)))],
      ["resumed", this._chips(record.resumed)],
      ["preempted", this._chips(record.preempted.keys(), (id) => tellPreemption(record.preempted.get(id), history.settings))],
      ["finished", this._chips(record.finished.keys(), (id) => inWords(record.finished.get(id)))],
      ["batch", this._chips(record.ids)],
      ["waiting", record.waiting.length && this._chips(record.waiting)],
      ["swapped", record.swapped.length && this._chips(record.swapped)],
    ]);
    const reason = whyNotAdmitted(record);
    if (reason) this._say(reason);
  }

  _cachedNote(cached) {
    return cached ? `with ${countOf(cached, "token")} from the prefix cache` : "";
  }

  // ---------------------------------------------------------------- a request

  _tellRequest(id) {
    const { history, index } = this;
    const story = history.requestStory(id, index);
    this._title(story.label, requestColor(story.number, this.theme));
    this._facts([
      ["now", this._stateOf(story)],
      ["prompt", countOf(story.promptTokens, "token")],
      ["cached", story.cachedTokens > 0 && `${countOf(story.cachedTokens, "token")} of it`],
      ["output", countOf(story.outputTokens, "token")],
      ["computed", story.computedTokens && countOf(story.computedTokens, "token")],
      ["first token", this._firstToken(story)],
      ["preempted", story.numPreemptions && countOf(story.numPreemptions, "time")],
      ["blocks", story.blocks.length && this._blocks(story.blocks)],
    ]);
    this._list(story.events.map((event) => this._stepLink(event)));
    if (story.prompt) this._quote("Prompt", story.prompt);
    if (story.text) this._quote("Answer", story.text);
  }

  _stateOf({ id, queue, reason }) {
    const record = this.history.record(this.index);
    const row = record.ids.indexOf(id);
    if (row >= 0) {
      const { start, numTokens, numDrafts } = record.share(row);
      const where = numTokens === 1 ? `position ${start}` : `positions ${start} to ${start + numTokens - 1}`;
      const drafts = numDrafts ? `; ${record.numAccepted(row)} of ${countOf(numDrafts, "draft")} accepted` : "";
      return `running, computes ${countOf(numTokens, "token")}: ${where}${drafts}`;
    }
    return {
      "to come": "not arrived yet",
      waiting: "waiting",
      swapped: "swapped: its blocks are in host memory",
      running: "running, computes no token in this step",
      ended: `ended: ${inWords(reason)}`,
    }[queue];
  }

  _firstToken({ timeToFirstToken, firstToken, arrived }) {
    if (timeToFirstToken === undefined) return "";
    const steps = countOf(firstToken - arrived + 1, "step");
    const isStep = this.history.settings.time_unit && timeToFirstToken === firstToken - arrived + 1;
    return isStep ? `after ${steps}` : `after ${steps}, ${inTime(this.history, timeToFirstToken)}`;
  }

  // ---------------------------------------------------------------- a block

  _tellBlock(block) {
    const { history, index } = this;
    const story = history.blockStory(block, index);
    const size = history.settings.block_size;
    this._title(`Block ${block}`);
    this._facts([
      ["held by", story.holders.length ? this._chips(story.holders) : "no request"],
      ["filled", (story.holders.length || story.cached) && `${story.filled} of ${countOf(size, "token")}`],
      ["shared", story.refCount > 1 && `by ${story.refCount} requests`],
      ["cached", story.cached && !story.holders.length && "free, still cached: a request with the same prefix finds it"],
    ]);
    this._list(story.history.map((line) => makeElement("span", {}, line)));
  }

  // ---------------------------------------------------------------- pieces

  _title(text, color) {
    const title = makeElement("h3", { class: "nv-story-title" });
    if (color) title.append(this._dot(color));
    title.append(text);
    this.parts.push(title);
  }

  _say(text) {
    this.parts.push(makeElement("p", {}, text));
  }

  _facts(pairs) {
    const list = makeElement("dl");
    for (const [name, value] of pairs.filter(([, each]) => each)) {
      const definition = makeElement("dd");
      definition.append(value);
      list.append(makeElement("dt", {}, name), definition);
    }
    this.parts.push(list);
  }

  _list(items) {
    if (!items.length) return;
    const list = makeElement("ol", { class: "nv-story-events" });
    for (const item of items) {
      const entry = makeElement("li");
      entry.append(item);
      list.append(entry);
    }
    this.parts.push(list);
  }

  _quote(title, text) {
    this.parts.push(makeElement("h4", {}, title), makeElement("blockquote", {}, text));
  }

  _dot(color) {
    const dot = makeElement("span", { class: "nv-dot" });
    dot.style.background = color;
    return dot;
  }

  _link(label, action, color) {
    const button = makeElement("button", { type: "button", class: "nv-link" });
    if (color) button.append(this._dot(color));
    button.append(label);
    this.actions.set(button, action);
    return button;
  }

  _chips(ids, note = () => "") {
    const line = makeElement("span", { class: "nv-chips" });
    for (const id of ids) {
      const request = this.history.requests.get(id);
      if (!request) continue; // so long ago that it is forgotten
      const color = requestColor(request.number, this.theme);
      const link = this._link(request.label, () => this.select({ kind: "request", id }), color);
      const words = note(id);
      const item = words ? makeElement("span", { class: "nv-noted" }) : link;
      if (words) item.append(link, ` ${words}`);
      line.append(item);
    }
    return line.childNodes.length ? line : "";
  }

  _blocks(table) {
    const line = makeElement("span", { class: "nv-chips" });
    for (const block of table) line.append(this._link(String(block), () => this.select({ kind: "block", id: block })));
    return line;
  }

  _stepLink({ index, step, what }) {
    const name = `step ${step}`;
    return this._linked(name, index >= this.history.first && (() => this.seek(index)), what);
  }

  /** A line about something at a moment, to which its name leads. */
  _linked(name, action, what) {
    const line = makeElement("span");
    line.append(action ? this._link(name, action) : name, `: ${what}`);
    return line;
  }
}
