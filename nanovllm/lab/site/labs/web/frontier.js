// The playground's picture: each fleet is a point, its P99 time to the first token against its P99 time per token.
import { draw, make } from "./elements.js";

const WIDTH = 640;
const HEIGHT = 440;
const LEFT = 84;
const BOTTOM = 46;
const ticks = [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000];

const ttft = ({ summary }) => summary.p99_ttft_ms;
const tpot = ({ summary }) => summary.p99_tpot_ms;

/** What a fleet is, in words. */
export function fleetWords({ split, chunk }, engines) {
  const layout = split ? `${split} for prefill, ${engines - split} for decode` : `${engines} replicas`;
  return `${layout}, ${chunk} tokens per step`;
}

function scale(values, from, to) {
  const low = Math.log(Math.min(...values) * 0.85);
  const high = Math.log(Math.max(...values) * 1.2);
  const place = (value) => from + ((Math.log(value) - low) / (high - low)) * (to - from);
  return { place, marks: ticks.filter((tick) => Math.log(tick) >= low && Math.log(tick) <= high) };
}

const short = (ms) => (ms >= 1000 ? `${ms / 1000} s` : `${ms} ms`);

/** Draw all points so far into an element; the first is the reader's fleet. */
export function showFrontier(element, points, frontier, engines) {
  const known = points.filter((point) => point.summary?.completed);
  if (!known.length) return element.replaceChildren();
  const x = scale(known.map(tpot), LEFT, WIDTH - 20);
  const y = scale(known.map(ttft), HEIGHT - BOTTOM, 20);
  const at = (point) => [x.place(tpot(point)), y.place(ttft(point))];
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "frontier", role: "img",
    "aria-label": `${known.length} fleets; ${frontier.length} are on the frontier` });
  for (const tick of x.marks) {
    const place = x.place(tick);
    svg.append(draw("line", { x1: place, x2: place, y1: 20, y2: HEIGHT - BOTTOM, class: "grid" }),
      draw("text", { x: place, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, short(tick)));
  }
  for (const tick of y.marks) {
    const place = y.place(tick);
    svg.append(draw("line", { x1: LEFT, x2: WIDTH - 20, y1: place, y2: place, class: "grid" }),
      draw("text", { x: LEFT - 6, y: place + 4, "text-anchor": "end" }, short(tick)));
  }
  svg.append(draw("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle", class: "axis" }, "P99 time per output token"),
    draw("text", { transform: `translate(14 ${(HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle", class: "axis" }, "P99 time to the first token"));
  const best = frontier.map((index) => points[index]).sort((a, b) => tpot(a) - tpot(b));
  svg.append(draw("polyline", { class: "line", points: best.map((point) => at(point).join(",")).join(" ") }));
  const labels = [];
  for (const point of known.slice().reverse()) {
    const [cx, cy] = at(point);
    const isOwn = point === points[0];
    const kind = isOwn ? "own" : best.includes(point) ? "best" : "other";
    const words = `${fleetWords(point, engines)}: ${short(Math.round(ttft(point)))}, ${short(tpot(point).toFixed(1))}; ${point.summary.bottleneck}`;
    const mark = draw("title", {}, words);
    const r = isOwn ? 8 : 5;
    // Round: replicas; a diamond: engines for prefill and engines for decode.
    svg.append(point.split ? draw("path", { d: `M${cx - r - 1} ${cy}l${r + 1} ${-r - 1} ${r + 1} ${r + 1} ${-r - 1} ${r + 1}z`, class: `fleet ${kind}` }, mark)
      : draw("circle", { cx, cy, r, class: `fleet ${kind}` }, mark));
    if (!isOwn && kind !== "best") continue;
    if (labels.some(([x, y]) => Math.abs(cx - x) < 80 && Math.abs(cy - y) < 13)) continue; // its title says it
    labels.push([cx, cy]);
    const layout = point.split ? `${point.split}+${engines - point.split}` : `${engines}`;
    svg.append(draw("text", { x: cx + r + 3, y: cy - r + 1, class: "label" }, `${layout}, ${point.chunk}`));
  }
  const words = ["● replicas", "◆ engines for prefill + engines for decode", "label: engines, tokens per step"];
  element.replaceChildren(svg, make("ul", { class: "legend" }, ...words.map((each) => make("li", {}, each))));
}
