// The playground: sliders over a simulated fleet, and the frontier, which redraws while it is simulated.
import { find, make } from "./elements.js";
import { fleetWords, showFrontier } from "./frontier.js";
import { Page } from "./page.js";

const FIGURES = [
  ["takes most of a step (and why)", (s) => s.bottleneck],
  ["time to the first token, P99", (s) => `${s.p99_ttft_ms.toFixed(0)} ms`],
  ["time per output token, P99", (s) => `${s.p99_tpot_ms.toFixed(1)} ms`],
  ["requests per second, until the last one has ended", (s) => s.request_throughput.toFixed(1)],
  ["output tokens per second", (s) => s.output_throughput.toFixed(0)],
  ["dollars per million output tokens", (s) => s.dollars_per_million_output_tokens?.toFixed(2) ?? "unknown"],
];

const BOUNDS = {
  bytes: "what it reads from the GPU's memory",
  FLOPs: "arithmetic",
  link: "what it sends to other GPUs",
  host: "the host, which launches it",
};

/** A bottleneck, such as "mlp (bytes)": the part of a step that takes most time, and what the time is spent on. */
function bottleneckWords(words) {
  const [, part, bound] = /^(.*) \((\w+)\)$/.exec(words) ?? [];
  return part ? `${part}, limited by ${BOUNDS[bound] ?? bound}` : words;
}

export class WhatIf extends Page {
  film = "Without it, nothing can be simulated here.";

  constructor(python) {
    super(python);
    this.sliders = {};
    for (const { name, words, values, begin } of this.data.lab.sliders) this._add(name, words, values, begin);
    this.wasReady = false;
    this.showState();
  }

  _add(name, words, values, begin) {
    const range = make("input", { type: "range", id: `slider-${name}`, min: 0, max: values.length - 1, value: values.indexOf(begin) });
    const shown = make("output", { for: `slider-${name}` }, String(begin));
    const value = () => values[Number(range.value)];
    range.oninput = () => {
      this._bound();
      shown.textContent = value();
      range.setAttribute("aria-valuetext", value());
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.simulate(), 250);
    };
    range.setAttribute("aria-valuetext", begin);
    this.sliders[name] = { range, value, shown };
    find("sliders").append(make("label", { for: `slider-${name}` }, words), range, shown);
  }

  /** At least one engine decodes. */
  _bound() {
    const { engines, split } = this.sliders;
    split.range.value = Math.min(Number(split.range.value), engines.value() - 1);
    split.shown.textContent = split.value();
  }

  get settings() {
    return Object.fromEntries(Object.entries(this.sliders).map(([name, { value }]) => [name, value()]));
  }

  showState() {
    super.showState();
    if (this.python.state === "ready" && !this.wasReady) this.simulate();
    this.wasReady = this.python.state === "ready";
  }

  /** Simulate the reader's fleet, then its neighbours, one by one: newer settings end it after the current one. */
  async simulate() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const { engines, split, chunk, ...others } = this.settings;
    const fleets = [{ split, chunk }];
    for (let prefill = 0; prefill < engines; prefill += 1) {
      for (const each of this.data.lab.chunks) {
        if (prefill !== split || each !== chunk) fleets.push({ split: prefill, chunk: each });
      }
    }
    const points = [];
    for (const fleet of fleets) {
      await this.running;
      if (turn !== this.turn || this.isGone || this.python.state !== "ready") return;
      const known = points.map(({ summary }) => summary);
      const options = { ...others, engines, ...fleet, known };
      this.running = this.ask({ call: "run", lab: this.data.lab, texts: {}, options });
      const { summary, frontier, impossible, error } = await this.running;
      if (turn !== this.turn || this.isGone || error) return;
      if (summary) {
        points.push({ ...fleet, summary });
        this._show(points, frontier, engines, fleets.length);
      } else if (!points.length) {
        return this.complain({ message: impossible });
      }
    }
    this.done = turn;
  }

  _show(points, frontier, engines, count) {
    const [own] = points;
    const isBest = frontier.includes(0);
    const left = points.length < count ? ` ${points.length} of ${count} fleets are simulated.` : "";
    find("caption").textContent = `Your fleet (${fleetWords(own, engines)}) is ${isBest ? "" : "not "}on the frontier.`
      + ` Its bottleneck: ${bottleneckWords(own.summary.bottleneck)}.${left}`;
    showFrontier(find("picture"), points, frontier, engines);
    const rows = FIGURES.map(([name, words]) =>
      make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, words(own.summary))));
    find("figures").replaceChildren(...rows);
  }
}
