// What the pages of all labs have: their data, the state of Python, a message, and a table of figures.
import { find, make } from "./elements.js";

const LOADING = "Python starts: 6 MB, which the browser keeps, and some seconds on each visit.";

export class Page {
  constructor(python) {
    this.python = python;
    this.data = JSON.parse(find("lab").textContent);
    this.name = this.data.lab.name;
    this.buttons = []; // that need Python
    find("stop").onclick = () => python.stop();
    const reason = find("reason");
    if (reason) {
      const key = `nanovllm.lab.${this.name}.reason`;
      reason.value = localStorage.getItem(key) ?? "";
      reason.oninput = () => localStorage.setItem(key, reason.value);
    }
  }

  /** Say whether Python is there; `film`: what the page shows without it. */
  showState() {
    const { state, reason } = this.python;
    const words = {
      loading: `${LOADING} ${this.film}`,
      ready: "",
      missing: `${reason} ${this.film}`,
      failed: `Python could not be loaded: ${reason}. ${this.film}`,
    };
    find("state").textContent = words[state];
    document.body.dataset.python = state;
    this.busy(false);
  }

  busy(busy) {
    find("stop").disabled = !busy;
    for (const button of this.buttons) button.disabled = busy || this.python.state !== "ready";
    document.body.dataset.busy = busy;
  }

  /** Ask the driver; a fault is told on the page. */
  async ask(request, onNews) {
    this.complain(null);
    this.busy(true);
    const answer = await this.python.ask(request, onNews);
    if (this.isGone) return answer;
    this.busy(false);
    if (answer.error) this.complain(answer.error);
    this.print(answer.printed);
    return answer;
  }

  /** Show what the reader's code has printed. */
  print(text) {
    const box = find("printed");
    if (box) box.hidden = !text;
    if (text) box.lastElementChild.textContent = text;
  }

  complain(error) {
    const box = find("message");
    box.hidden = !error;
    if (!error) return;
    const step = error.step === undefined ? "" : `Step ${error.step}`;
    const head = [step, error.invariant ? "an invariant does not hold" : ""].filter(Boolean).join(": ");
    box.replaceChildren(make("strong", {}, head && `${head}. `), error.message, ...(error.note ? [make("p", {}, error.note)] : []));
  }

  /** Fill the table. `columns`: [words, figures] of earlier runs, the first of which is compared with this one;
      `words`: what this run is; `isWhole`: it has not failed, so that it can be compared. */
  showFigures(figures, columns, words, isWhole) {
    const earlier = columns.map(([, each]) => Object.fromEntries(each));
    const rows = figures.map(([name, value]) => {
      const cells = [...earlier.map((each) => each[name] ?? ""), value].map((text) => make("td", {}, text));
      const row = make("tr", {}, make("th", { scope: "row" }, name), ...cells);
      row.classList.toggle("differs", isWhole && earlier.length > 0 && earlier[0][name] !== value);
      return row;
    });
    const heads = [...columns.map(([each]) => each), words];
    const head = make("tr", {}, make("td"), ...heads.map((each) => make("th", { scope: "col" }, each)));
    find("figures").replaceChildren(...(rows.length ? [head, ...rows] : []));
  }

  destroy() {
    this.isGone = true;
  }
}
