// A lab: an editor for some of the engine's functions, a player for what the engine then does, and its tests.
import { mountPlayer } from "./players.js";
import { Editor } from "./editor.js";
import { find, make } from "./elements.js";
import { showLanes } from "./lanes.js";
import { Page } from "./page.js";
import { showPictures } from "./picture.js";

export class Lab extends Page {
  film = "The pictures already show the engine's own run.";

  constructor(python) {
    super(python);
    this.targets = Object.keys(this.data.sources);
    this.number = 0; // of the target that is shown
    this.texts = this.targets.map((target) => localStorage.getItem(this._key(target)) ?? this.data.sources[target]);
    this.mounted = null; // the player
    this.numRuns = 0;
    this.place = null; // where the reader's code has failed
    this.usual = this.data.scene; // of the engine's own code, with the controls of the newest run
    this.rule = this.data.lab.rule ?? "vLLM's rule";
    this.latest = null; // the figures of the reader's newest run
    this.before = null; // those of the reader's newest run that differs from it
    this.latestSettings = null; // of both: runs with other settings are not compared
    this.verdict = null; // of the tests on the code in the editor: "sound" or "broken"
    this.isOld = false; // the pictures are not those of the newest run of this code
    this.buttons = ["run", "check", "score"].map(find).filter(Boolean);
    this._build();
    const edited = this.texts.some((text, i) => text !== this.data.sources[this.targets[i]]);
    this.showScene(this.data.scene, `What the engine's own code does${edited ? ". Your code is in the editor: press Run" : ""}`);
  }

  _key(target) {
    return `nanovllm.lab.${this.name}.${target}`;
  }

  _build() {
    this.editor = new Editor(find("editor"), { onChange: (text) => this._changed(text), onRun: () => this.run() });
    this.targets.forEach((target, number) => {
      const tab = make("button", { type: "button", role: "tab" }, target.split(":")[1]);
      tab.onclick = () => this.select(number);
      find("tabs").append(tab);
    });
    find("run").onclick = () => this.run();
    if (find("check")) find("check").onclick = () => this.check();
    find("reset").onclick = () => this.reset();
    this.controls = {};
    for (const [name, [words, ...values]] of Object.entries(this.data.lab.controls ?? {})) {
      const select = make("select", { name }, ...values.map((value) => make("option", { value }, String(value))));
      select.onchange = () => this.run();
      this.controls[name] = select;
      find("controls").append(make("label", {}, `${words} `, select));
    }
    this.select(0);
    this.showState();
  }

  select(number) {
    this.number = number;
    for (const [i, tab] of [...find("tabs").children].entries()) {
      tab.setAttribute("aria-selected", i === number);
      tab.classList.toggle("edited", this.texts[i] !== this.data.sources[this.targets[i]]);
    }
    this.editor.show(this.texts[number]);
    this._mark();
  }

  _mark() {
    this.editor.mark(this.place?.[0] === this.number ? this.place[1] : null);
  }

  /** Replace the text of a target. */
  setText(number, text) {
    const target = this.targets[number];
    this.texts[number] = text;
    if (text === this.data.sources[target]) localStorage.removeItem(this._key(target));
    else localStorage.setItem(this._key(target), text);
    find("tabs").children[number].classList.toggle("edited", text !== this.data.sources[target]);
  }

  _changed(text) {
    this.setText(this.number, text);
    this.forget();
    this._age();
    if (this.error) this.complain(null);
  }

  /** Take away the verdict on code that the reader has changed since. */
  forget() {
    find("tests")?.replaceChildren();
    this.verdict = null;
    if (this.scene) this._showGoal();
  }

  /** Mark pictures and figures that are not those of the code in the editor. */
  _age(isOld = this.isOwn && JSON.stringify(this.texts) !== this.code) {
    this.isOld = isOld;
    find("caption").closest(".result").classList.toggle("old", isOld);
    const words = `${isOld ? "Older result. " : ""}${this.caption}`;
    if (find("caption").textContent !== words) find("caption").textContent = words;
    this._showGoal();
  }

  reset() {
    this.editor.replace(this.data.sources[this.targets[this.number]]);
    this.forget();
    this.complain(null);
    this._mark();
  }

  /** What is asked of the driver: the texts that differ from the engine's. */
  request(call) {
    const texts = this.targets.map((target, i) => [target, this.texts[i]]);
    const changed = texts.filter(([target, text]) => text !== this.data.sources[target]);
    this.asked = changed.map(([target]) => this.targets.indexOf(target));
    const options = Object.entries(this.controls).map(([name, select]) => [name, Number(select.value)]);
    return { call, lab: this.data.lab, texts: Object.fromEntries(changed), options: Object.fromEntries(options) };
  }

  async run() {
    if (find("run").disabled) return;
    const request = this.request("run");
    const { asked } = this;
    const code = JSON.stringify(this.texts);
    this.numRuns += 1;
    let { usual } = this;
    if (asked.length && this.hasSettings) {
      usual = await this.ask({ ...request, texts: {} });
      if (this.isGone) return;
      if (!usual.figures) return this._age(true);
    }
    const answer = await this.ask(request);
    if (this.isGone) return;
    if (!answer.figures) {
      find("message").scrollIntoView({ block: "nearest" });
      return this._age(true);
    }
    this.usual = asked.length ? usual : answer;
    const names = asked.map((number) => this.targets[number].split(":")[1]).join(", ");
    const same = JSON.stringify(answer.figures) === JSON.stringify(this.scene.figures) ? "; the same figures as before" : "";
    const words = asked.length ? `what your code does, ${names} edited` : "what the engine's own code does";
    this.showScene(answer, `Run ${this.numRuns}: ${words}${this._settings()}${same}`, code);
    const result = find("caption").closest(".result");
    // A message may be below the fold; on a narrow screen the pictures are below the editor.
    if (this.error) find("message").scrollIntoView({ block: "nearest" });
    else if (result.offsetLeft < 100) result.scrollIntoView({ block: "start" });
  }

  get hasSettings() {
    return Object.keys(this.controls).length > 0;
  }

  /** The scene with which a run of the engine's own code is compared: the first, if settings differ. */
  _baseline() {
    return this._settings() ? this.data.scene : null;
  }

  /** The settings that the reader has changed, in words; `number`: of another choice, as 0, the page's own. */
  _settings(number) {
    const changed = Object.entries(this.controls).filter(([, select]) => select.selectedIndex > 0);
    const words = ([name, select]) => `, ${this.data.lab.controls[name][0]}: ${select.options[number ?? select.selectedIndex].value}`;
    return changed.map(words).join("");
  }

  async check() {
    const { error } = this; // of the run, which the tests do not mend
    const code = JSON.stringify(this.texts);
    this.forget();
    const { tests } = await this.ask(this.request("check"));
    if (!tests || this.isGone || JSON.stringify(this.texts) !== code) return;
    this._showTests(tests);
    this._showGoal();
    if (error) this.complain(error);
  }

  complain(error) {
    super.complain(error);
    this.error = error;
    this.place = null;
    if (error?.place) this._point(error);
    this._mark();
  }

  /** Add the reader's line to a message, and mark it in the editor. */
  _point({ place, raised }) {
    const number = this.asked[place[0]];
    const line = this.texts[number].split("\n")[place[1] - 1]?.trim() ?? "";
    this.place = [number, place[1]];
    const later = "The engine found this later, so the fault may be in another line. The last of yours that ran is line";
    const words = raised ? "In your line" : later;
    find("message").append(make("p", {}, `${words} ${place[1]}: `, make("code", {}, line)));
    if (number !== this.number) this.select(number);
  }

  /** Show a run; `code`: the texts that have run, as JSON. */
  showScene(scene, caption, code = JSON.stringify(this.texts)) {
    this.scene = scene;
    this.caption = caption;
    this.code = code;
    const isOwn = scene !== this.usual && this.asked?.length > 0;
    this.isOwn = isOwn;
    if (scene.trace) {
      this.mounted ??= mountPlayer(find("player"), { views: this.data.lab.views, speed: 4 });
      this.mounted.update(scene.trace);
      const { player } = this.mounted;
      if (scene.error) player.seek(Math.min(scene.error.step ?? Infinity, player.history.length - 1));
    }
    const headings = [`The engine's own code${this.data.lab.rule ? "" : ", which is vLLM's rule"}`, "Your code"];
    const baseline = isOwn ? null : this._baseline();
    const [base, own] = baseline ? [baseline, true] : [this.usual, isOwn];
    const settings = this._settings();
    if (baseline) headings[1] = `${headings[0]}${settings}`;
    headings[0] += baseline ? this._settings(0) : settings;
    if (scene.lanes) showLanes(find("lanes"), base.lanes, own ? scene.lanes : null, headings);
    else find("lanes").replaceChildren();
    if (scene.picture) showPictures(find("picture"), own ? [base.picture, scene.picture] : [scene.picture], headings);
    else find("picture").replaceChildren();
    this._showText(scene.text);
    const isWhole = !scene.error || scene.error.continues;
    const before = isOwn ? this._earlier(scene.figures, settings, isWhole) : null;
    const failed = isWhole ? "" : ", until it fails";
    this._showMeasures(scene.figures, before, isOwn, baseline, `your code${failed}`);
    const columns = own ? [[baseline ? `engine's code${this._settings(0)}` : "engine's code", base.figures]] : [];
    if (before) columns.push(["your last run", before]);
    const now = isOwn ? `your code${failed}` : `engine's code${settings}`;
    this.showFigures(scene.figures, columns, now, isWhole);
    this._age();
  }

  /** The figures of the reader's last run with these settings that differs from this one; this one is remembered
      if it has not failed. */
  _earlier(figures, settings, isWhole) {
    if (settings !== this.latestSettings) [this.latestSettings, this.latest, this.before] = [settings, null, null];
    const isSame = JSON.stringify(figures) === JSON.stringify(this.latest);
    if (!isWhole) return this.latest;
    if (!isSame) [this.before, this.latest] = [this.latest, figures];
    return this.before;
  }

  /** Show lines of words: [name, [[word, kind], ...]]. */
  _showText(lines) {
    const parts = (lines ?? []).flatMap(([name, words]) => [
      make("dt", {}, name), make("dd", {}, ...words.flatMap(([word, kind]) => [make("span", { class: `kind-${kind}` }, word), " "])),
    ]);
    find("text").replaceChildren(...parts);
  }

  /** Say whether the reader's code reaches the goal of the hard task. */
  _showGoal() {
    const { goal } = this.data.lab;
    find("goal").hidden = !goal || !this.isOwn || this.isOld;
    if (find("goal").hidden) return;
    const state = this._goalState(goal);
    const words = {
      failed: "not reached, since the run has failed",
      missed: "not reached yet",
      unchecked: "reached by the figures; now press Check",
      broken: "not reached: the figures would do, and a test fails",
      sound: "reached",
    };
    find("goal").classList.toggle("reached", state === "sound");
    find("goal").textContent = `Goal of the hard task, ${goal.figure} at most ${goal.most}: ${words[state]}.`;
  }

  _goalState({ figure, most }) {
    if (this.scene.error) return "failed";
    if (!(Number(Object.fromEntries(this.scene.figures)[figure]) <= most)) return "missed";
    return this.verdict ?? "unchecked";
  }

  /** The figures that the lab is about: of the engine's code, and of the reader's last two runs. */
  _showMeasures(figures, before, isOwn, baseline, own) {
    const [now, last, usual] = [figures, before ?? [], this.usual.figures].map(Object.fromEntries);
    const cards = (this.data.lab.measures ?? []).map((name) => {
      const first = baseline ? [[this._settings(0).slice(2), Object.fromEntries(baseline.figures)[name]]] : [];
      const words = baseline ? this._settings().slice(2) : this.rule;
      const values = [...first, [words, usual[name]], ["your last run", last[name]], [own, isOwn ? now[name] : undefined]];
      const shown = values.filter(([, value]) => value !== undefined);
      const parts = shown.map(([words, value]) => make("span", {}, make("b", {}, value), words));
      const card = make("div", { class: "measure" }, make("h3", {}, name), ...parts);
      card.classList.toggle("differs", isOwn && now[name] !== usual[name] && (!this.scene.error || this.scene.error.continues));
      return card;
    });
    find("measures").replaceChildren(...cards);
    find("all").open ||= !cards.length;
  }

  _showTests(tests) {
    const items = tests.map((test) => {
      const [kind, mark] = test.passed ? ["passed", "✓ passed"] : test.choice ? ["failed choice", "≠ another rule"] : ["failed", "✗ failed"];
      const item = make("li", { class: kind });
      item.append(make("span", { class: "mark" }, mark), ` ${test.sentence}`);
      if (test.passed) return item;
      const why = [test.message, ...test.why.filter((line) => line !== test.message)];
      item.append(make("pre", {}, why.join("\n")));
      return item;
    });
    const failed = tests.filter((test) => !test.passed && !test.choice).length;
    const others = tests.filter((test) => !test.passed && test.choice).length;
    this.verdict = failed ? "broken" : "sound";
    const all = others ? "Nothing that must hold is broken." : `All ${tests.length} tests of the engine pass.`;
    const other = others ? ` ${others} of ${tests.length} tests describe the engine's own rule: yours is another one.` : "";
    const sum = (failed ? `${failed} of ${tests.length} tests fail.` : all) + other;
    find("tests").replaceChildren(make("li", { class: "sum", role: "status" }, sum), ...items);
  }

  destroy() {
    super.destroy();
    this.mounted?.destroy();
    this.editor.destroy();
  }
}
