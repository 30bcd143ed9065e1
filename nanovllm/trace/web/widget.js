// The player as a notebook widget (anywidget): carries the trace from the kernel and the reader's step both ways.
import { History, TraceReader } from "./history.js";
import { createPlayer } from "./player.js";
import { makeElement } from "./story.js";

// All of a trace file's lines as a history.
export function readHistory(bytes) {
  const reader = new TraceReader();
  let history = null;
  for (const line of new TextDecoder().decode(bytes).split("\n")) {
    if (!line) continue;
    const { header, record } = reader.readLine(line);
    if (header) history = new History(header.settings);
    else history.append(record);
  }
  if (!history) throw new Error("an empty trace");
  return history;
}

/** Show what a model holds in a player that `make` makes, as `createPlayer` does, of what `read` makes of its lines. */
export function renderWidget({ model, el }, make = createPlayer, read = readHistory) {
  const options = { views: model.get("views"), theme: model.get("theme"), speed: model.get("speed") };
  const failure = makeElement("p", { class: "nv-failure", role: "alert" });
  let history = null;
  const onStep = (index) => {
    const { step } = history.record(index);
    if (step === model.get("step")) return; // the kernel has said so itself
    model.set("step", step);
    model.save_changes();
  };
  const player = make(el, { ...options, onStep });
  const seek = () => {
    if (!history?.length) return;
    const index = history.indexOfStep(model.get("step"));
    if (index === player.index) return;
    player.pause();
    player.seek(index);
  };
  const load = () => {
    failure.remove();
    try {
      history = read(model.get("lines"));
    } catch (error) {
      failure.textContent = `This trace cannot be shown: ${error.message}`;
      el.append(failure);
      return;
    }
    player.setHistory(history);
    seek();
  };
  load();
  model.on("change:lines", load);
  model.on("change:step", seek);
  return () => {
    model.off("change:lines", load);
    model.off("change:step", seek);
    player.destroy();
  };
}
