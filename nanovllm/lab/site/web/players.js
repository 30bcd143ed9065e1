// Players on pages that no kernel stands behind. `mountPlayer` makes one from a trace, or from the timelines of ranks;
// `mountStored` makes one of each that a page holds, when the reader scrolls to it. Until then, and without JavaScript, and on paper,
// the page shows the picture that the notebook stored.
import { createPlayer } from "../../../trace/web/player.js";
import { createRankPlayer } from "../../../trace/web/rank_player.js";
import { readRanks } from "../../../trace/web/ranks.js";
import { makeElement } from "../../../trace/web/story.js";
import { readHistory } from "../../../trace/web/widget.js";
import PLAYER_SHEET from "../../../trace/web/player.css" with { type: "css" };

const AHEAD = "600px"; // a stored player starts this far outside of the window: what the reader sees does not jump
const OUTPUTS = ".cell_output, .jp-OutputArea, body"; // of one cell: on the site, in exported lectures, elsewhere

/** The bytes of a file that a page holds: deflated (zlib), in base64. */
async function inflate(stored) {
  const deflated = Uint8Array.from(atob(stored), (letter) => letter.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Put a player into an element.
 *
 * Options: `lines`: a trace file's text or bytes, or else `trace`: the same as pages store it (`inflate`); without both
 * the player is empty until `update`; `ranks`: timelines of ranks as pages store them, instead of a trace; `views`: names of the pictures, from top to bottom; `step`: number of the step that is
 * shown first; `speed`: steps per second; `theme`: "light", "dark" or "auto" (as the page); `autoplay`: play as soon as the
 * reader sees it, unless the reader asked for reduced motion.
 *
 * Returns {player, ready, update(lines), destroy()}. `update` shows another trace, at the step with the same number; `ready`
 * resolves once the first trace is shown. A trace that cannot be read is told on the page.
 */
export function mountPlayer(element, options = {}) {
  const { lines, trace, ranks, views, step = 0, speed, theme, autoplay = false } = options;
  const stored = trace ?? ranks;
  if (!document.adoptedStyleSheets.includes(PLAYER_SHEET)) document.adoptedStyleSheets.push(PLAYER_SHEET);
  const make = ranks === undefined ? createPlayer : createRankPlayer;
  const read = ranks === undefined ? readHistory : readRanks;
  const player = make(element, { views, speed, theme });
  const failure = makeElement("p", { class: "nv-failure", role: "alert" });
  let wanted = step;

  const show = (bytes) => {
    const history = read(bytes);
    player.setHistory(history);
    player.seek(history.indexOfStep(wanted));
  };
  const fail = (error) => {
    failure.textContent = `This trace cannot be shown: ${error.message}`;
    element.append(failure);
  };
  const update = (next) => {
    failure.remove();
    if (player.history?.length) wanted = player.history.record(player.index).step;
    try {
      show(typeof next === "string" ? new TextEncoder().encode(next) : next);
    } catch (error) {
      fail(error);
    }
  };
  const load = async () => {
    if (stored !== undefined) await inflate(stored).then(show).catch(fail);
    else if (lines !== undefined) update(lines);
  };

  const sights = new IntersectionObserver((changes) => {
    if (!changes.some((change) => change.isIntersecting)) return;
    sights.disconnect();
    player.play();
  });
  const ready = load().then(() => {
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (autoplay && !isCalm) sights.observe(player.element);
  });
  const destroy = () => {
    sights.disconnect();
    failure.remove();
    player.destroy();
  };
  return { player, ready, update, destroy };
}

/** Do something once with each element that comes near to what the reader sees. */
export function whenNear(elements, action) {
  const sights = new IntersectionObserver(
    (changes) => {
      for (const { target, isIntersecting } of changes) {
        if (!isIntersecting) continue;
        sights.unobserve(target);
        action(target);
      }
    },
    { rootMargin: AHEAD },
  );
  for (const element of elements) sights.observe(element);
}

/** Make a player of each trace that is stored below an element, in the place of the picture above it. */
export function mountStored(root) {
  whenNear(root.querySelectorAll(".nv-stored"), (place) => {
    const pictures = [...place.closest(OUTPUTS).querySelectorAll("img")];
    const follows = (picture) => picture.compareDocumentPosition(place) & Node.DOCUMENT_POSITION_FOLLOWING;
    pictures.findLast(follows)?.classList.add("nv-replaced");
    mountPlayer(place, JSON.parse(place.dataset.player));
  });
}
