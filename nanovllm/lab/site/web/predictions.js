// Predictions on pages: the reader types a guess and locks it; then the outputs that answer it open, and say how far off
// the guess is. What is locked is kept in the browser. The data are those that `course.predict` stores in a notebook
// (nanovllm/lab/course/predict.py); numbers and distances are said as there.
import { makeElement } from "../../../trace/web/story.js";
import PREDICTION_SHEET from "./predictions.css" with { type: "css" };

// Folded outputs of the site, and of exported lectures.
const FOLDED = ".cell.tag_hide-output details, details.jp-Cell-outputWrapper";
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
    this._draw();
  }

  /** The locked guess: this reader's, or else the notebook's; undefined if there is none. */
  get guess() {
    const own = this.guesses.get(this.data.question);
    return own === undefined ? this.data.guess : (own ?? undefined);
  }

  /** Draw the form, or, once it is locked, the guess. */
  _draw() {
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
    const answers = makeElement("div", { class: "nv-answers" });
    const again = makeElement("button", { type: "button" }, "Predict again");
    again.addEventListener("click", () => {
      this._keep(null);
      this.element.querySelector("input").focus({ preventScroll: true });
    });
    answers.append(makeElement("span", { role: "status" }, `You predict: ${say(guess, unit)}`), again);
    locked.append(ask("span", question), answers);
    if (!this.guesses.isKept) locked.append(makeElement("p", {}, "This browser does not keep it for your next visit."));
    return locked;
  }

  _keep(guess) {
    this.guesses.set(this.data.question, guess);
    this._draw();
    this.onChange();
  }
}

/** Show what was measured, and how far the guess and the lecture's formula are from it. */
function drawAnswer(element, guess) {
  const { question, unit, measured, formula } = JSON.parse(element.dataset.answer);
  const list = makeElement("dl");
  const tell = (name, text, look) => list.append(makeElement("dt", {}, name), makeElement("dd", { class: look }, text));
  tell("you predicted", guess === undefined ? "nothing yet" : say(guess, unit) + distance(guess, measured));
  if (formula !== undefined) tell("by the formula", say(formula, unit) + distance(formula, measured));
  tell("measured", say(measured, unit), "nv-measured");
  element.replaceChildren(ask("span", question), list);
}

/** Make forms of the predictions below an element. Their answers open once all predictions that they answer are locked. */
export function mountPredictions(root) {
  const found = [...root.querySelectorAll(`.nv-prediction, .nv-reveal, ${FOLDED}`)];
  if (!found.some((element) => element.matches(".nv-prediction"))) return;
  document.adoptedStyleSheets.push(PREDICTION_SHEET);
  const page = decodeURI(location.pathname).split("/").at(-1).replace(/\.html$/, "");
  const guesses = new Guesses(page);
  const predictions = new Map(); // question -> its prediction
  const answers = []; // {element, prediction}
  const folds = []; // {fold, needed}: a folded output, and the predictions that it answers
  const show = () => {
    for (const { element, prediction } of answers) drawAnswer(element, prediction.guess);
    for (const { fold, needed } of folds) {
      fold.open ||= needed.length > 0 && needed.every((prediction) => prediction.guess !== undefined);
    }
  };
  let open = new Set(); // asked, and not answered so far
  let last = [];
  for (const element of found) {
    if (element.matches(".nv-prediction")) {
      const prediction = new Prediction(element, guesses, show);
      predictions.set(prediction.data.question, prediction);
      open.add(prediction);
    } else if (element.matches(".nv-reveal")) {
      const prediction = predictions.get(JSON.parse(element.dataset.answer).question);
      if (!prediction) continue; // its question is not on this page
      answers.push({ element, prediction });
      open.delete(prediction);
    } else {
      const own = [...element.querySelectorAll(".nv-reveal")].map((each) => predictions.get(JSON.parse(each.dataset.answer).question));
      const needed = [...new Set([...open, ...own.filter(Boolean)])];
      last = needed.length ? needed : last; // a fold right below draws the same values
      folds.push({ fold: element, needed: last });
    }
  }
  show();
}
