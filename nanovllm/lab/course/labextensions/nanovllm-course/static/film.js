// A GIF as a film that the reader can stop and step: a canvas in the place of the image, and controls below it.
// A browser that cannot decode single frames (`ImageDecoder`) shows the animation as it is.

// The controls look as those of the player (nanovllm/trace/web/player.css).
const FILM_STYLE = `
  .nanovllm-film { margin: 0.5em 0; }
  .nanovllm-film canvas { display: block; max-width: 100%; }
  .nanovllm-film div { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 10px; max-width: 900px; padding: 8px 0; }
  .nanovllm-film button {
    min-width: 44px; min-height: 36px; padding: 0 8px; border: 1px solid color-mix(in srgb, currentcolor 30%, transparent);
    border-radius: 6px; background: transparent; color: inherit; font: inherit; cursor: pointer;
  }
  .nanovllm-film button:hover { border-color: currentcolor; }
  .nanovllm-film :focus-visible { outline: 2px solid #56b4e9; outline-offset: 2px; }
  .nanovllm-film input { flex: 1 1 120px; min-width: 0; height: 36px; margin: 0; accent-color: #767676; }
  .nanovllm-film output { font-variant-numeric: tabular-nums; }
  @media print { .nanovllm-film div { display: none; } }`;

const make = (name, values, ...children) => {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
};

export async function showFilm(image) {
  if (image.dataset.film || !window.ImageDecoder) return;
  image.dataset.film = "shown";
  const data = await (await fetch(image.src)).arrayBuffer();
  const decoder = new ImageDecoder({ data, type: "image/gif" });
  await decoder.tracks.ready;
  await decoder.completed;
  const last = decoder.tracks.selectedTrack.frameCount - 1;
  if (last < 1) return;

  let index = 0;
  let timer = 0;
  let isPlaying = false;
  const canvas = make("canvas", { role: "img", ariaLabel: image.alt });
  const play = make("button", { type: "button" });
  const back = make("button", { type: "button", textContent: "◀", title: "One picture back" });
  const on = make("button", { type: "button", textContent: "▶", title: "One picture on" });
  const slider = make("input", { type: "range", min: 0, max: last, value: 0, ariaLabel: "Picture" });
  const position = make("output");

  const show = async (wanted) => {
    clearTimeout(timer);
    index = Math.min(Math.max(wanted, 0), last);
    if (index === last) isPlaying = false;
    slider.value = index;
    position.textContent = `${index + 1} of ${last + 1}`;
    play.textContent = isPlaying ? "Pause" : "Play";
    const asked = index;
    const { image: frame } = await decoder.decode({ frameIndex: asked });
    if (asked === index) {
      if (canvas.width !== frame.displayWidth) {
        [canvas.width, canvas.height] = [frame.displayWidth, frame.displayHeight];
      }
      canvas.getContext("2d").drawImage(frame, 0, 0);
      clearTimeout(timer);
      if (isPlaying) timer = setTimeout(() => canvas.isConnected && show(index + 1), frame.duration / 1000);
    }
    frame.close();
  };
  const step = (wanted) => {
    isPlaying = false;
    return show(wanted);
  };
  play.onclick = () => {
    isPlaying = !isPlaying;
    return show(isPlaying && index === last ? 0 : index);
  };
  back.onclick = () => step(index - 1);
  on.onclick = () => step(index + 1);
  slider.oninput = () => step(slider.valueAsNumber);

  await show(0);
  const film = make("figure", { className: "nanovllm-film" }, make("style", { textContent: FILM_STYLE }), canvas,
    make("div", {}, play, back, on, slider, position));
  // A double click would open JupyterLab's editor of the text, and keys would be its commands.
  film.addEventListener("dblclick", (event) => event.stopPropagation());
  film.dataset.lmSuppressShortcuts = "true";
  image.hidden = true;
  image.style.display = "none";
  image.after(film);
}
