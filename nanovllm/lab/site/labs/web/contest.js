// The contest: a score of the reader's rule against vLLM's, and a link with the code.
import { Lab } from "./edit.js";
import { find, make } from "./elements.js";
import { pack, unpack } from "./link.js";

export class Contest extends Lab {
  constructor(python) {
    super(python);
    find("score").onclick = () => this.score();
    find("copy").onclick = () => this._copy();
    this.opened = this._open().then(() => { this.isOpen = true; });
  }

  /** Take the code from the page's address, if it has some. */
  async _open() {
    const shared = new URLSearchParams(location.hash.slice(1));
    const number = this.targets.findIndex((target) => target.split(":")[1] === shared.get("rule"));
    if (number < 0 || !shared.get("code")) return;
    let text;
    try {
      text = await unpack(shared.get("code"));
    } catch {
      return this.complain({ message: "The link is damaged: it holds no code. Copy it again." });
    }
    this.texts[number] = text; // not kept in the browser, which may have another text of the reader's
    this.select(number);
    const claim = Number(shared.get("score"));
    find("lanes").replaceChildren();
    this.caption = `Code from a link, which says that it scores ${claim}. Press Score to see.`;
    find("caption").textContent = this.caption;
  }

  _build() {
    this.workload = make("select", { name: "workload" });
    this.workload.onchange = () => this.run();
    super._build();
    find("controls").append(make("label", {}, "picture of ", this.workload));
  }

  /** The contest of the rule in the editor. */
  get contest() {
    return this.targets[this.number].split(":")[1];
  }

  /** Show a rule, and what the engine's own does. */
  select(number) {
    super.select(number);
    this.forget();
    const names = this.data.workloads[this.contest];
    this.workload.replaceChildren(...names.map((name, value) => make("option", { value }, name)));
    this.before = null; // another rule has other figures
    this.latest = null;
    if (this.isOpen) this.run();
  }

  forget() {
    find("share").hidden = true;
    find("scores").replaceChildren();
  }

  /** What is asked of the driver: about the rule in the editor alone. */
  request(call) {
    const target = this.targets[this.number];
    const isEdited = this.texts[this.number] !== this.data.sources[target];
    this.asked = isEdited ? [this.number] : [];
    const texts = isEdited ? { [target]: this.texts[this.number] } : {};
    const options = { rule: this.contest, workload: Number(this.workload.value) };
    return { call, lab: this.data.lab, contest: this.contest, texts, options };
  }

  get hasSettings() {
    return true;
  }

  _baseline() {
    return null;
  }

  _settings() {
    return `, ${this.workload.selectedOptions[0].textContent}`;
  }

  async score() {
    this.forget();
    const rows = [];
    const show = (last) => find("scores").replaceChildren(rows.length ? this._table(rows) : "", last);
    const request = this.request("score");
    const answer = await this.ask(request, (news) => {
      rows.push(news);
      show("");
    });
    if (answer.error) return show(make("p", {}, "No score."));
    this.points = answer.score;
    show(make("p", { class: "points" }, make("strong", {}, String(answer.score)), " points; vLLM's rule has 100."));
    find("share").hidden = false;
    find("copied").textContent = "";
  }

  _table(rows) {
    const head = ["workload", "vLLM's rule", "yours"].map((words) => make("th", { scope: "col" }, words));
    const body = rows.map(({ workload, usual, yours }) =>
      make("tr", {}, make("th", { scope: "row" }, workload), make("td", {}, usual.toFixed(1)), make("td", {}, yours.toFixed(1))));
    const unit = rows.length ? make("caption", {}, `Mean ${rows[0].unit}`) : "";
    return make("table", { class: "figures" }, unit, make("tr", {}, ...head), ...body);
  }

  /** The address of this page with the code and its score. */
  async link() {
    const address = new URL(location.href);
    const code = await pack(this.texts[this.number]);
    address.hash = new URLSearchParams({ rule: this.targets[this.number].split(":")[1], score: this.points, code });
    return address.href;
  }

  async _copy() {
    const href = await this.link();
    history.replaceState(null, "", href);
    try {
      await navigator.clipboard.writeText(href);
      find("copied").textContent = "Copied.";
    } catch {
      find("copied").textContent = "It is in the address bar: copy it there.";
    }
  }
}
