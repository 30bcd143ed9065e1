// Predictions on pages: the reader types a guess and locks it; then its card says what was measured and how far off the
// guess is, and the outputs and the text that explain it, which were covered, are shown. What is locked is kept in the
// browser. The data are those that `course.predict` stores in a notebook (nanovllm/lab/course/predict.py); numbers and
// distances are said as there.
import { makeElement } from "../../../trace/web/story.js";
import PREDICTION_SHEET from "./predictions.css" with { type: "css" };

// Folded outputs of the site, and of exported lectures.
const FOLDED = ".cell.tag_hide-output details.below-input, details.jp-Cell-outputWrapper";
const CELL = ".cell"; // of the site, where a section's cells and paragraphs are its children
const KEY = "nanovllm.predictions";
const RIGHT = 0.05; // a guess that is at most this far off

/** A value as a reader sees it: "12,346 ms", "0.125". */
function say(value, unit) {
  if (typeof value === "string") return value;
  const digits = Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  return unit ? `${digits} ${unit}` : digits;
}

/** How far a value is from what was measured: ": right", ", 2.1 times too high". */
function distance(value, measured) {
  if (typeof value === "string" || !(value > 0 && measured > 0)) return value === measured ? ": right" : ": no";
  const ratio = value / measured;
  if (Math.abs(ratio - 1) <= RIGHT) return ": right";
  return `, ${Number(Math.max(ratio, 1 / ratio).toPrecision(2))} times too ${ratio > 1 ? "high" : "low"}`;
}

/** A question, in which lecturers set off words as *these* and `these`. */
function ask(tag, question) {
  const made = makeElement(tag, { class: "nv-question" });
  for (const part of question.split(/(\*[^*\s][^*]*\*|`[^`]+`)/)) {
    const kind = { "*": "em", "`": "code" }[part[0]];
    made.append(kind && part.length > 2 ? makeElement(kind, {}, part.slice(1, -1)) : part);
  }
  return made;
}

/** The guesses that this browser keeps, of all lectures: page and question -> guess. */
class Guesses {
  constructor(page) {
    this.page = page;
    this.own = {}; // where the browser keeps nothing
    this.isKept = true;
  }

  #read() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      this.isKept = false; // the page says so next to the guess
      return this.own;
    }
  }

  get(question) {
    return this.#read()[this.page]?.[question];
  }

  set(question, guess) {
    const all = this.#read();
    all[this.page] = { ...all[this.page], [question]: guess };
    this.own = all;
    try {
      localStorage.setItem(KEY, JSON.stringify(all));
    } catch {
      this.isKept = false;
    }
  }
}

class Prediction {
  constructor(element, guesses, onChange) {
    this.element = element;
    this.guesses = guesses;
    this.onChange = onChange;
    this.data = JSON.parse(element.dataset.prediction);
    this.place = null; // of its answer on the page
    this.cover = null; // over what explains the answer
  }

  /** The locked guess: this reader's, or else the notebook's; undefined if there is none. */
  get guess() {
    const own = this.guesses.get(this.data.question);
    return own === undefined ? this.data.guess : (own ?? undefined);
  }

  /** Draw the form, or, once it is locked, the guess. */
  draw() {
    const { guess } = this;
    this.element.classList.toggle("nv-locked", guess !== undefined);
    this.element.replaceChildren(guess === undefined ? this._form() : this._locked(guess));
  }

  _form() {
    const { question, unit, among } = this.data;
    const form = makeElement("form");
    const fields = makeElement(among.length ? "fieldset" : "div");
    const answers = makeElement("div", { class: "nv-answers" });
    if (among.length) {
      fields.append(ask("legend", question));
      for (const answer of among) {
        const choice = makeElement("label");
        choice.append(makeElement("input", { type: "radio", name: "guess", value: answer }), answer);
        answers.append(choice);
      }
    } else {
      fields.append(ask("span", question));
      const field = makeElement("input", { type: "text", inputmode: "decimal", name: "guess", autocomplete: "off" });
      field.setAttribute("aria-label", `Your prediction${unit ? `, in ${unit}` : ""}: ${question}`);
      const label = makeElement("label");
      label.append(field, unit);
      answers.append(label);
    }
    answers.append(makeElement("button", { type: "submit" }, "Lock"));
    this.complaint = makeElement("p", { role: "status" });
    fields.append(answers, this.complaint);
    form.append(fields);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._lock(new FormData(form).get("guess"));
    });
    return form;
  }

  _lock(typed) {
    const { unit, among } = this.data;
    const text = (typed ?? "").trim().replaceAll(",", "");
    const guess = among.length ? typed : Number(text);
    if (among.length ? guess === null : !text || !Number.isFinite(guess)) {
      this.complaint.textContent = among.length ? "Choose one of the answers." : `Type a number${unit ? ` of ${unit}` : ""}.`;
      return;
    }
    this._keep(guess);
    this.element.querySelector("button").focus({ preventScroll: true });
  }

  _locked(guess) {
    const { question, unit } = this.data;
    const locked = makeElement("div");
    const result = makeElement("div", { role: "status" });
    result.append(this.place ? listAnswer(answerAt(this.place), guess) : `You predict: ${say(guess, unit)}`);
    const buttons = makeElement("div", { class: "nv-answers" });
    if (this.place) {
      const explain = makeElement("button", { type: "button" }, `How it was ${sourceOf(answerAt(this.place))}`);
      explain.addEventListener("click", () => this._showPlace());
      buttons.append(explain);
    }
    const again = makeElement("button", { type: "button" }, "Predict again");
    again.addEventListener("click", () => {
      this._keep(null);
      this.element.querySelector("input").focus({ preventScroll: true });
    });
    buttons.append(again);
    locked.append(ask("span", question), result, buttons);
    if (!this.guesses.isKept) locked.append(makeElement("p", {}, "This browser does not keep it for your next visit."));
    return locked;
  }

  /** Scroll to the cell that measured the answer. */
  _showPlace() {
    this.cover?.open();
    for (let fold = this.place.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    (this.place.closest(CELL) ?? this.place).scrollIntoView({ block: "start" });
  }

  _keep(guess) {
    this.guesses.set(this.data.question, guess);
    this.draw();
    this.onChange();
  }
}

/** What is hidden between a question and the explanation of its answer. */
class Cover {
  constructor(elements, predictions) {
    this.predictions = predictions; // that are to be locked
    this.hidden = makeElement("div", { class: "nv-covered", hidden: "until-found" });
    this.line = makeElement("p", { class: "nv-cover" }, "The answer and its explanation are covered until you lock a prediction. ");
    const show = makeElement("button", { type: "button" }, "Show them");
    show.addEventListener("click", () => this.open());
    this.line.append(show);
    elements[0].before(this.line, this.hidden);
    this.hidden.append(...elements);
    this.hidden.addEventListener("beforematch", () => this.open()); // the browser's search has found something in it
  }

  open() {
    this.line.remove();
    this.hidden.removeAttribute("hidden");
    for (const fold of this.hidden.querySelectorAll(FOLDED)) fold.open = true;
  }
}

/** Whether a paragraph has a title of its own, in bold. */
function beginsTopic(element) {
  const [begin] = element.childNodes;
  return element.matches("p") && begin?.nodeName === "STRONG";
}

/** The elements of a section between a question and the explanation of its answers; none if they are elsewhere. */
function explanationOf(question, isAnswer) {
  const found = [];
  let end = 0;
  let next = question.closest(CELL)?.nextElementSibling;
  for (; next && !next.matches("section") && !next.querySelector(".nv-prediction"); next = next.nextElementSibling) {
    found.push(next);
    if ([...next.querySelectorAll(".nv-reveal")].some(isAnswer)) end = found.length;
  }
  const isFurther = (element) => !element.matches(CELL) || element.querySelector(FOLDED); // text, and further outputs
  const first = end;
  while (end > 0 && end < found.length && isFurther(found[end]) && (end === first || !beginsTopic(found[end]))) end++;
  const leadsOn = end - first > 1 && end === found.length && next?.matches(CELL);
  if (leadsOn) end--; // the last paragraph before another question belongs to that
  return found.slice(0, end);
}

const answerAt = (place) => JSON.parse(place.dataset.answer);

/** Where an answer comes from: "measured", or "simulated" by a simulator or a device that sleeps. */
const sourceOf = ({ simulated }) => (simulated ? "simulated" : "measured");

/** The answer, and how far the guess and the lecture's formula are from it. */
function listAnswer(answer, guess) {
  const { unit, measured, formula } = answer;
  const list = makeElement("dl");
  const tell = (name, text, look) => list.append(makeElement("dt", {}, name), makeElement("dd", { class: look }, text));
  tell("you predicted", guess === undefined ? "nothing yet" : say(guess, unit) + distance(guess, measured));
  if (formula !== undefined) tell("by the formula", say(formula, unit) + distance(formula, measured));
  tell(sourceOf(answer), say(measured, unit), "nv-measured");
  return list;
}

/** Make forms of the predictions below an element. What answers them is covered until all that it answers are locked. */
export function mountPredictions(root) {
  const found = [...root.querySelectorAll(`.nv-prediction, .nv-reveal, ${FOLDED}`)];
  if (!found.some((element) => element.matches(".nv-prediction"))) return;
  document.adoptedStyleSheets.push(PREDICTION_SHEET);
  const page = decodeURI(location.pathname).split("/").at(-1).replace(/\.html$/, "");
  const guesses = new Guesses(page);
  const predictions = new Map(); // question -> its prediction
  const answers = []; // {element, prediction}
  const folds = []; // {fold, needed}: a folded output, and the predictions that it answers
  const covers = [];
  const show = () => {
    for (const { element, prediction } of answers) {
      const answer = answerAt(element);
      element.replaceChildren(ask("span", answer.question), listAnswer(answer, prediction.guess));
    }
    const areLocked = (needed) => needed.length > 0 && needed.every((prediction) => prediction.guess !== undefined);
    for (const { fold, needed } of folds) fold.open ||= areLocked(needed);
    for (const cover of covers) if (areLocked(cover.predictions)) cover.open();
  };
  let open = new Set(); // asked, and not answered so far
  let last = [];
  const askedTogether = new Map(); // prediction -> those that are open behind it
  for (const element of found) {
    if (element.matches(".nv-prediction")) {
      const prediction = new Prediction(element, guesses, show);
      predictions.set(prediction.data.question, prediction);
      open.add(prediction);
      askedTogether.set(prediction, [...open]);
    } else if (element.matches(".nv-reveal")) {
      const prediction = predictions.get(answerAt(element).question);
      if (!prediction) continue; // its question is not on this page
      prediction.place ??= element;
      answers.push({ element, prediction });
      open.delete(prediction);
    } else {
      const own = [...element.querySelectorAll(".nv-reveal")].map((each) => predictions.get(answerAt(each).question));
      const needed = [...new Set([...open, ...own.filter(Boolean)])];
      last = needed.length ? needed : last; // a fold right below draws the same values
      folds.push({ fold: element, needed: last });
    }
  }
  for (const [prediction, asked] of askedTogether) {
    const hidden = explanationOf(prediction.element, (place) => asked.includes(predictions.get(answerAt(place).question)));
    if (hidden.length === 0) continue;
    const cover = new Cover(hidden, asked);
    for (const each of asked) each.cover ??= cover;
    covers.push(cover);
  }
  for (const prediction of predictions.values()) prediction.draw();
  show();
}
