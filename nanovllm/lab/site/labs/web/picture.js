// A picture of rows and cells: engines over steps, or the words of a step.
import { make } from "./elements.js";

/** A table of {columns, rows: [{name, cells: [{at, text, kind, title}]}]}. */
function drawPicture({ columns, rows }, heading) {
  const body = rows.map(({ name, cells }) => {
    const byPlace = new Map(cells.map((cell) => [cell.at, cell]));
    const row = make("tr", {}, make("th", { scope: "row" }, name));
    for (let at = 0; at < columns; at += 1) {
      const cell = byPlace.get(at);
      const title = cell && cell.title !== cell.text ? cell.title : undefined;
      row.append(make("td", cell ? { class: `kind-${cell.kind}`, title } : {}, cell?.text ?? ""));
    }
    return row;
  });
  const scroller = make("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": heading });
  scroller.append(make("table", { class: "cells" }, ...body));
  return scroller;
}

/** Show pictures below one another, each with its heading, and their legend: {kind: words}. */
export function showPictures(element, pictures, headings) {
  const marks = Object.entries(pictures[0].legend).map(([kind, words]) =>
    make("li", {}, make("span", { class: `swatch kind-${kind}`, "aria-hidden": "true" }), words));
  const parts = pictures.flatMap((each, number) => [make("h3", {}, headings[number]), drawPicture(each, headings[number])]);
  element.replaceChildren(...parts, make("ul", { class: "legend" }, ...marks));
}
