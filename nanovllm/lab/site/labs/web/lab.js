// A lab's page: an editor for some of the engine's functions, a player for what the engine then does, and its tests.
import { mountPlayer } from "./players.js";
import { Editor } from "./editor.js";
import { Python } from "./python.js";

const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const LOADING = "Python is being loaded: some 6 MB, once. The player already shows the engine's own run.";

/** One lab, in the page's `main`. */
class Lab {
  constructor(python) {
    this.python = python;
    this.data = JSON.parse(find("lab").textContent);
    this.targets = Object.keys(this.data.sources);
    this.number = 0; // of the target that is shown
    this.texts = this.targets.map((target) => localStorage.getItem(this._key(target)) ?? this.data.sources[target]);
    this.mounted = null; // the player
    this.place = null; // where the reader's code has failed
    this._build();
    this._showScene(this.data.scene, "The engine's own code");
  }

  _key(target) {
    return `nanovllm.lab.${this.data.lab.name}.${target}`;
  }

  _build() {
    this.editor = new Editor(find("editor"), { onChange: (text) => this._changed(text), onRun: () => this.run() });
    this.targets.forEach((target, number) => {
      const name = target.split(":")[1];
      const tab = make("button", { type: "button", role: "tab", id: `tab-${number}` }, name);
      tab.onclick = () => this._select(number);
      find("tabs").append(tab);
    });
    find("run").onclick = () => this.run();
    find("check").onclick = () => this.check();
    find("reset").onclick = () => this.reset();
    find("stop").onclick = () => this.python.stop();
    this._select(0);
    this.showState();
  }

  _select(number) {
    this.number = number;
    for (const [i, tab] of [...find("tabs").children].entries()) {
      tab.setAttribute("aria-selected", i === number);
      tab.classList.toggle("edited", this.texts[i] !== this.data.sources[this.targets[i]]);
    }
    this.editor.show(this.texts[number]);
    this.editor.mark(this.place?.[0] === number ? this.place[1] : null);
  }

  _changed(text) {
    const target = this.targets[this.number];
    const isOwn = text === this.data.sources[target];
    this.texts[this.number] = text;
    if (isOwn) localStorage.removeItem(this._key(target));
    else localStorage.setItem(this._key(target), text);
    find("tabs").children[this.number].classList.toggle("edited", !isOwn);
    if (this.place) this._complain(null);
  }

  /** What is asked of the driver: the texts that differ from the engine's. */
  _request(call) {
    const changed = this.targets.map((target, i) => [target, this.texts[i]]);
    const texts = changed.filter(([target, text]) => text !== this.data.sources[target]);
    this.asked = texts.map(([target]) => this.targets.indexOf(target));
    return { call, lab: this.data.lab, texts: Object.fromEntries(texts) };
  }

  async _ask(call) {
    this._complain(null);
    this._busy(true);
    const begun = performance.now();
    const answer = await this.python.ask(this._request(call));
    this.milliseconds = Math.round(performance.now() - begun);
    this._busy(false);
    if (answer.error) this._complain(answer.error);
    return answer;
  }

  async run() {
    if (find("run").disabled) return;
    const answer = await this._ask("run");
    const whose = this.asked.length ? "Your code" : "The engine's own code";
    if (answer.trace) this._showScene(answer, answer.error ? `${whose}, up to the step that failed` : whose);
  }

  async check() {
    const { tests } = await this._ask("check");
    if (tests) this._showTests(tests);
  }

  reset() {
    const target = this.targets[this.number];
    this.texts[this.number] = this.data.sources[target];
    localStorage.removeItem(this._key(target));
    this._complain(null);
    this._select(this.number);
  }

  _busy(busy) {
    find("stop").disabled = !busy;
    for (const id of ["run", "check"]) find(id).disabled = busy || this.python.state !== "ready";
    document.body.dataset.busy = busy;
  }

  showState() {
    const { state, reason } = this.python;
    const words = {
      loading: LOADING,
      ready: "",
      missing: `${reason} The player shows the engine's own run.`,
      failed: `Python could not be loaded: ${reason}. The player shows the engine's own run.`,
    };
    find("state").textContent = words[state];
    document.body.dataset.python = state;
    this._busy(false);
  }

  _complain(error) {
    const box = find("message");
    box.hidden = !error;
    this.place = null;
    if (error) {
      const step = error.step === undefined ? "" : `Step ${error.step}`;
      const head = [step, error.invariant ? "an invariant does not hold" : ""].filter(Boolean).join(": ");
      box.replaceChildren(make("strong", {}, head && `${head}. `), error.message);
      if (error.place) this._point(box, error);
    }
    this.editor.mark(this.place?.[0] === this.number ? this.place[1] : null);
  }

  /** Add the reader's line to a message, and mark it in the editor. */
  _point(box, { place, raised }) {
    const number = this.asked[place[0]];
    const line = this.texts[number].split("\n")[place[1] - 1]?.trim() ?? "";
    this.place = [number, place[1]];
    const words = raised ? "In your line" : "The last of your lines that ran is line";
    box.append(make("p", {}, `${words} ${place[1]}: `, make("code", {}, line)));
    if (number !== this.number) this._select(number);
  }

  _showScene(scene, caption) {
    find("caption").textContent = caption;
    if (scene.trace) {
      this.mounted ??= mountPlayer(find("player"), { views: this.data.lab.views, speed: 4 });
      this.mounted.update(scene.trace);
      const { player } = this.mounted;
      if (scene.error) player.seek(player.history.length - 1);
    }
    this.scene = scene;
    this._showFigures(scene.figures ?? []);
  }

  _showFigures(figures) {
    const own = Object.fromEntries(this.data.scene.figures ?? []);
    const head = make("tr", {}, make("th", {}, ""), make("th", {}, "engine"), make("th", {}, "now"));
    const rows = figures.map(([name, value]) => {
      const row = make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, own[name] ?? ""), make("td", {}, value));
      row.classList.toggle("differs", own[name] !== value);
      return row;
    });
    find("figures").replaceChildren(head, ...rows);
  }

  _showTests(tests) {
    const items = tests.map((test) => {
      const item = make("li", { class: test.passed ? "passed" : "failed" });
      item.append(make("span", { class: "mark" }, test.passed ? "✓ passed" : "✗ failed"), ` ${test.sentence}`);
      if (test.passed) return item;
      const why = [test.message, ...test.why.filter((line) => line !== test.message)];
      item.append(make("pre", {}, why.join("\n")));
      return item;
    });
    const failed = tests.filter((test) => !test.passed).length;
    const sum = failed ? `${failed} of ${tests.length} tests fail.` : `All ${tests.length} tests of the engine pass.`;
    find("tests").replaceChildren(make("li", { class: "sum", role: "status" }, sum), ...items);
  }

  destroy() {
    this.mounted?.destroy();
    this.editor.destroy();
  }
}

let lab = null;
const python = new Python((state, reason) => {
  // The constructor reports a state, too, before there is a lab.
  queueMicrotask(() => {
    python.state = state;
    python.reason = reason;
    lab?.showState();
  });
});
lab = new Lab(python);
window.nanovllmLab = { get lab() { return lab; }, python };

find("theme").onclick = () => {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
  dataset.mode = dataset.theme;
  localStorage.setItem("mode", dataset.mode);
  localStorage.setItem("theme", dataset.theme);
};

/** Go from lab to lab without a new page, so that Python stays loaded. */
async function go(href, isBack = false) {
  const response = await fetch(href);
  if (!response.ok) return location.assign(href);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (!page.getElementById("lab")) return location.assign(href);
  if (!isBack) history.pushState(null, "", href);
  lab.destroy();
  document.title = page.title;
  for (const place of ["main", "nav"]) document.querySelector(place).replaceWith(document.adoptNode(page.querySelector(place)));
  scrollTo(0, 0);
  lab = new Lab(python);
  find("main").focus();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-lab]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.href);
});
addEventListener("popstate", () => go(location.href, true));
