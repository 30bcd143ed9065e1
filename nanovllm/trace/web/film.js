// The player for a camera: one beat at a time, with a title above the pictures and a caption below them.
import { createPlayer } from "./player.js";
import { makeElement } from "./story.js";
import { readHistory } from "./widget.js";

const MOST_NAMED = 4;

/** "A, B, C and 2 more": the labels of requests. */
function listNames(history, ids) {
  const names = [...ids].map((id) => history.requests.get(id)?.label ?? id);
  const more = names.length - MOST_NAMED;
  return names.slice(0, MOST_NAMED).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** What the scheduler changed in a step; where nothing changed, what the step computes. */
export function tellChanges(history, index) {
  const record = history.record(index);
  const lists = {
    Preempted: record.preempted.keys(), Arrived: record.arrived, Admitted: record.admitted.keys(),
    Resumed: record.resumed, Finished: record.finished.keys(),
  };
  const told = Object.entries(lists).map(([what, ids]) => [what, listNames(history, ids)]).filter(([, names]) => names);
  const cached = [...record.admitted.values()].reduce((sum, tokens) => sum + tokens, 0);
  if (cached) told.push(["Prompt tokens found in the prefix cache", cached]);
  const { numTokens, numDecode: decode, numDrafts: drafts, numAcceptedDrafts: accepted } = record;
  if (!told.length) told.push(["This step computes", `${numTokens - decode - drafts} prefill and ${decode} decode tokens`]);
  if (drafts) told.push(["Drafts accepted", `${accepted} of ${drafts}`]);
  return told.map(([what, names]) => `${what}: ${names}.`).join(" ");
}

/** Put a film of a trace file's text on the page. `fit(indices)` makes its pictures as high as these records need. `show(beat)`
 * draws a beat; it resolves to the caption once it is drawn. */
export function openFilm({ text, title, views, settings }) {
  const history = readHistory(new TextEncoder().encode(text));
  const heading = makeElement("h1", {}, title);
  const position = makeElement("span", { class: "step" });
  const caption = makeElement("p");
  heading.append(position);
  document.body.append(heading);
  const player = createPlayer(document.body, { views, theme: "light", settings });
  document.body.append(caption);
  player.setHistory(history);
  const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return {
    async fit(indices) {
      await drawn(); // the pictures have their width now
      for (const view of player.views) {
        view.height = Math.max(...indices.map((index) => Math.ceil(view.drawing.height(history, view.width, index))));
      }
    },
    async show({ index, words, focus }) {
      player.seek(index);
      const kind = typeof focus === "number" ? "block" : "request";
      player.select(focus === null ? null : { kind, id: focus });
      position.textContent = `step ${history.record(index).step}`;
      caption.textContent = words || tellChanges(history, index);
      await drawn();
      return caption.textContent;
    },
  };
}
