// A picture of rows and cells: engines over steps, or the words of a step.
import { make } from "./elements.js";

/** Draw {columns, rows: [{name, cells: [{at, text, kind, title}]}], legend: {kind: words}} into an element. */
export function showPicture(element, picture) {
  const { columns, rows, legend } = picture;
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
  const marks = Object.entries(legend).map(([kind, words]) =>
    make("li", {}, make("span", { class: `swatch kind-${kind}`, "aria-hidden": "true" }), words));
  const scroller = make("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Steps" });
  scroller.append(make("table", { class: "cells" }, ...body));
  element.replaceChildren(scroller, make("ul", { class: "legend" }, ...marks));
}
