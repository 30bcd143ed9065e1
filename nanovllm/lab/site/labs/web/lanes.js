// Lanes over time: what each request, device or engine does when. Two pictures have the same scale of time.
import { draw, make } from "./elements.js";

const WIDTH = 1000;
const NAMES = 74;
const ROW = 17;
const FOOT = 18;

/** The first of 1, 2, 5, 10, 20, ... of which at most 12 fit. */
function gapOf(end) {
  let gap = 1;
  for (const factor of [1, 2, 5, 10, 20, 50, 100, 200, 500]) if (end / (gap = factor) <= 12) break;
  return gap;
}

/** Draw {unit, end, rows: [{name, pieces: [{from, to, kind, text, title}]}], legend}; `end`: of the scale. */
function drawLanes({ unit, rows, fault }, end, words) {
  const place = (time) => NAMES + (time / end) * (WIDTH - NAMES - 8);
  const height = rows.length * ROW;
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${height + FOOT}`, class: "lanes", role: "img", "aria-label": words });
  if (fault) {
    const [x, to] = fault.map(place);
    svg.append(draw("rect", { x, y: 0, width: Math.max(2, to - x), height, class: "fault" }, draw("title", {}, "the step that fails")));
  }
  const gap = gapOf(end);
  for (let time = 0; time <= end; time += gap) {
    const x = place(time);
    svg.append(draw("line", { x1: x, x2: x, y1: 0, y2: height, class: "grid" }),
      draw("text", { x, y: height + 14, "text-anchor": "middle" }, time ? `${time}` : unit));
  }
  for (const [number, { name, pieces }] of rows.entries()) {
    const y = number * ROW;
    svg.append(draw("text", { x: NAMES - 8, y: y + 13, "text-anchor": "end" }, name));
    for (const { from, to, kind, text, title } of pieces) {
      const [x, width] = [place(from), place(to) - place(from)];
      svg.append(draw("rect", { x, y: y + 1.5, width: Math.max(1, width - 0.7), height: ROW - 3, class: `lane-${kind}` },
        draw("title", {}, title)));
      if (text && width > 8 * text.length + 2) {
        svg.append(draw("text", { x: x + width / 2, y: y + 13, "text-anchor": "middle", class: `on-${kind}` }, text));
      }
    }
  }
  return svg;
}

/** Show the lanes of the engine's own code, and below them those of the reader's, if there are any. */
export function showLanes(element, usual, own, headings) {
  const pictures = own ? [usual, own] : [usual];
  const end = Math.max(1, ...pictures.map((each) => each.end));
  const legend = Object.assign({}, ...pictures.map((each) => each.legend));
  const marks = Object.entries(legend).map(([kind, words]) =>
    make("li", {}, make("span", { class: `swatch swatch-${kind}`, "aria-hidden": "true" }), words));
  const parts = pictures.flatMap((each, number) => {
    const scroller = make("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": headings[number] });
    scroller.append(drawLanes(each, end, headings[number]));
    return [make("h3", {}, headings[number]), scroller];
  });
  if (own?.fault) marks.push(make("li", {}, make("span", { class: "swatch swatch-fault", "aria-hidden": "true" }), "the step that fails"));
  element.replaceChildren(
    ...parts,
    make("ul", { class: "legend" }, ...marks),
  );
}
