// The player: controls, canvases and a panel that tells the story of what is pointed at. It knows nothing of how a
// picture is drawn (views.js) or of what the records mean (history.js); it knows where the reader is and what is selected.
import { VIEWS, LIGHT, DARK } from "./views.js";
import { StoryPanel, describeStep, makeElement } from "./story.js";

const SPEEDS = [0.5, 1, 2, 4, 8, 16, 32, 64]; // steps per second
const CALM_INTERVAL = 500; // milliseconds between pictures of a live page, where the reader asked for reduced motion
// The browser may share its processors with the engine that it shows: drawing takes at most this share of one of them.
const LIVE_SHARE = 0.03;
const LONGEST_INTERVAL = 1000; // milliseconds
const SHRINK_AFTER = 5000; // milliseconds for which a live picture is too high before it is made smaller
const SHRINK_IDLE = 1000; // the same, while the engine is idle

const ICONS = {
  back: "M11.5 3v10L4.5 8z",
  play: "M4 2.5v11L13.5 8z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  forward: "M4.5 3v10L11.5 8z",
};

function makeIcon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Whether the page is dark: as JupyterLab or a documentation site says, or else as the reader's system does. */
function pageIsDark() {
  const lab = document.body.dataset.jpThemeLight;
  const { theme } = document.documentElement.dataset; // Sphinx's themes
  if (lab !== undefined) return lab === "false";
  return theme === undefined ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
}

/**
 * Make a player in an element.
 *
 * Options: `views`: names from VIEWS, top to bottom; `live`: records keep coming, and the player follows the latest until
 * it is paused; `theme`: "light", "dark" or "auto"; `speed`: steps per second; `onStep(index)`: called when the reader moves;
 * `keysFrom`: the element in which keys move the player, by default its own; `settings`: further things for the views' scene.
 */
export function createPlayer(root, options = {}) {
  return new TracePlayer(root, options);
}

export class TracePlayer {
  static VIEWS = VIEWS;

  constructor(root, options) {
    const { views = ["tables", "timeline"], live = false, theme = "auto", speed = 2, onStep, keysFrom, settings } = options;
    const known = this.constructor.VIEWS;
    const unknown = views.filter((name) => !(name in known)).join(", ");
    if (unknown) throw new Error(`no such view: ${unknown}; there are ${Object.keys(known).join(", ")}`);
    this.live = live;
    this.speed = speed;
    this.onStep = onStep ?? (() => {});
    this.keysFrom = keysFrom;
    this.settings = settings ?? {};
    this.themeOption = theme;
    this.history = null;
    this.place = 0; // the index that was asked for
    this.selection = null;
    this.hover = null;
    this.following = live;
    this.playing = false;
    this.frame = 0;
    this.stale = false; // whether the pictures show something else than they should
    this.lastPlayed = 0;
    this.lastDrawn = -Infinity;
    this.drawingTime = 0; // milliseconds that a live picture takes, on average
    this.later = null; // the timer of the next live picture
    this.shrinking = null; // the timer of a live picture that may become smaller
    this.ending = new AbortController(); // takes all listeners away at once
    this._build(root, views);
    this._listen();
    this._applyTheme();
    this._showControls();
  }

  /** The record that is shown: one that is kept, although a live history drops its oldest before it says `changed`. */
  get index() {
    const { first, length } = this.history ?? { first: 0, length: 0 };
    return Math.max(Math.min(this.place, length - 1), first);
  }

  /** Show another history, from its beginning or, live, at its end. */
  setHistory(history) {
    this.pause();
    this.history = history;
    this.place = this.live ? history.length - 1 : history.first;
    this.following = this.live;
    this.selection = this.hover = null;
    for (const view of this.views) view.width = 0;
    this._showControls();
    this._redraw();
  }

  /** Say that records were appended to the history (or old ones dropped). */
  changed() {
    if (!this.history) return;
    if (this.following) this.place = this.history.length - 1;
    this._redrawInTime();
  }

  /** Go to a record by its index, which is brought into the range that there is. */
  seek(index) {
    if (!this._hasRecords()) return;
    const wanted = Math.min(Math.max(Math.round(index), this.history.first), this.history.length - 1);
    if (wanted === this.index) return;
    this.place = wanted;
    this._redraw();
    this.onStep(wanted);
  }

  /** Run on at `speed` steps per second; from the end, start over. */
  play() {
    if (!this._hasRecords()) return;
    if (this.index === this.history.length - 1) this.seek(this.history.first);
    this.playing = true;
    this.following = false;
    this.lastPlayed = performance.now();
    this._redraw();
  }

  /** Stop playing, or following what is live. */
  pause() {
    this.playing = this.following = false;
    this._redraw();
  }

  /** Keep to the latest record. */
  follow() {
    this.playing = false;
    this.following = true;
    this.changed();
    this._redraw();
  }

  /** Select a request ({kind: "request", id}) or block ({kind: "block", id}) in all views; null for nothing. */
  select(selection) {
    this.selection = selection;
    this._redraw();
  }

  /** Take everything off the page. */
  destroy() {
    this.ending.abort();
    this.resizes.disconnect();
    this.sights.disconnect();
    clearTimeout(this.later);
    clearTimeout(this.shrinking);
    this.themes.disconnect();
    cancelAnimationFrame(this.frame);
    this.element.remove();
  }

  _hasRecords() {
    return this.history !== null && this.history.length > this.history.first;
  }

  // ---------------------------------------------------------------- what is on the page

  _build(root, names) {
    const button = (name, label, title) => {
      const made = makeElement("button", { type: "button", class: `nv-button nv-${name}`, "aria-label": label, title });
      made.append(makeIcon(name));
      return made;
    };
    this.backButton = button("back", "Step back", "Step back (left arrow)");
    this.playButton = button("play", "Play", "Play or pause (space)");
    this.forwardButton = button("forward", "Step forward", "Step forward (right arrow)");
    const range = { type: "range", min: 0, max: 0, step: 1, value: 0 };
    this.slider = makeElement("input", { ...range, class: "nv-slider", "aria-label": "Step" });
    this.position = makeElement("span", { class: "nv-position" });
    const inWords = { title: "Steps per second", "aria-label": "Speed, in steps per second" };
    this.speedSelect = makeElement("select", { class: "nv-speed", ...inWords });
    for (const speed of [...new Set([...SPEEDS, this.speed])].sort((a, b) => a - b)) {
      this.speedSelect.append(makeElement("option", { value: speed }, `${speed}/s`));
    }
    this.speedSelect.value = String(this.speed);
    const follow = { type: "button", class: "nv-button nv-follow", title: "Keep to the latest step (end)" };
    this.followButton = makeElement("button", follow, "Follow");
    this.followButton.hidden = !this.live;
    const speed = makeElement("label", { class: "nv-speed-label" });
    speed.append(makeElement("span", {}, "Speed "), this.speedSelect);
    const controls = makeElement("div", { class: "nv-controls", role: "group", "aria-label": "Player" });
    const buttons = makeElement("span", { class: "nv-buttons" });
    buttons.append(this.backButton, this.playButton, this.forwardButton);
    controls.append(buttons, this.slider, this.position, speed, this.followButton);

    this.views = names.map((name) => this._buildView(name));
    this.pictures = makeElement("div", { class: "nv-pictures" });
    // Two columns where a page makes them so, of figures that follow one another without gaps.
    for (const column of [0, 1].slice(0, names.length)) {
      const made = makeElement("div", { class: "nv-column" });
      made.append(...this.views.filter((_, i) => i % 2 === column).map((view) => view.figure));
      this.pictures.append(made);
    }
    this.views.forEach((view, i) => (view.figure.style.order = i));
    this.story = this._makeStory((selection) => this.select(selection), (index) => this.seek(index));
    const body = makeElement("div", { class: "nv-body" });
    body.append(this.pictures, this.story.element);
    // JupyterLab's shortcuts (arrows move between cells) do not apply in here.
    this.element = makeElement("div", { class: "nv-player", "data-lm-suppress-shortcuts": "true" });
    this.element.append(controls, body);
    root.append(this.element);
  }

  _makeStory(select, seek) {
    return new StoryPanel(select, seek);
  }

  _buildView(name) {
    const drawing = this.constructor.VIEWS[name];
    const figure = makeElement("figure", { class: "nv-view", "data-view": name });
    const canvas = makeElement("canvas", { role: "img", class: "nv-canvas" });
    figure.append(makeElement("figcaption", {}, drawing.title), canvas);
    return { name, canvas, figure, drawing, regions: [], height: 0, width: 0, visible: true };
  }

  _showControls() {
    const any = this._hasRecords();
    for (const control of [this.backButton, this.playButton, this.forwardButton, this.slider]) control.disabled = !any;
    this.position.textContent = any ? this._positionText() : "no step yet";
    const action = this.playing ? "Pause" : "Play";
    if (this.playButton.ariaLabel !== action) {
      this.playButton.replaceChildren(makeIcon(action.toLowerCase()));
      this.playButton.ariaLabel = action;
    }
    this.followButton.setAttribute("aria-pressed", String(this.following));
    if (!any) return;
    this.backButton.disabled = this.index <= this.history.first;
    this.forwardButton.disabled = this.index >= this.history.length - 1;
    [this.slider.min, this.slider.max] = this._range();
    this.slider.value = this.history.record(this.index).step;
    this.slider.disabled = this.slider.min === this.slider.max;
    this.slider.setAttribute("aria-valuetext", this._positionText());
  }

  /** The numbers of the first and last step that can be looked at: an engine may have counted before the record begins. */
  _range() {
    return [this.history.record(this.history.first).step, this.history.record(this.history.length - 1).step];
  }

  _positionText() {
    const { step } = this.history.record(this.index);
    const [first, last] = this._range();
    return first === last ? `step ${step}` : `step ${step} of ${first}–${last}`;
  }

  /** The step that is shown, for readers who do not see the pictures. */
  _describe() {
    return describeStep(this.history, this.index);
  }

  /** For how many turns of `speed` a record is shown. */
  _turns() {
    return 1;
  }

  // ---------------------------------------------------------------- what the reader does

  _listen() {
    const on = (target, kind, action) => target.addEventListener(kind, action, { signal: this.ending.signal });
    on(this.backButton, "click", () => this._stepBy(-1));
    on(this.forwardButton, "click", () => this._stepBy(1));
    on(this.playButton, "click", () => this._togglePlay());
    on(this.followButton, "click", () => (this.following ? this.pause() : this.follow()));
    on(this.slider, "input", () => this._scrub(this.history.indexOfStep(Number(this.slider.value))));
    on(this.speedSelect, "change", () => (this.speed = Number(this.speedSelect.value)));
    on(this.keysFrom ?? this.element, "keydown", (event) => this._key(event));
    for (const view of this.views) {
      on(view.canvas, "pointermove", (event) => this._point(view, event));
      on(view.canvas, "pointerleave", () => this._setHover(null));
      on(view.canvas, "click", (event) => this._click(view, event));
    }
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this._applyTheme());
    this.themes = new MutationObserver(() => this._applyTheme());
    const attributeFilter = ["data-jp-theme-light", "data-theme"];
    for (const said of [document.documentElement, document.body]) this.themes.observe(said, { attributeFilter });
    this.resizes = new ResizeObserver(() => this._fit());
    this.resizes.observe(this.pictures);
    this.sights = new IntersectionObserver((changes) => this._see(changes));
    for (const view of this.views) this.sights.observe(view.figure);
  }

  _fit() {
    if (!this.views.every((view) => this._hasItsWidth(view))) this._redraw();
  }

  _hasItsWidth(view) {
    return Math.floor(view.figure.clientWidth) === view.width;
  }

  /** Pictures outside of the window are not drawn until they are scrolled into view. */
  _see(changes) {
    for (const { target, isIntersecting } of changes) {
      this.views.find((view) => view.figure === target).visible = isIntersecting;
    }
    this._redraw();
  }

  _applyTheme() {
    const dark = this.themeOption === "auto" ? pageIsDark() : this.themeOption === "dark";
    this.theme = dark ? DARK : LIGHT;
    this.element.dataset.theme = dark ? "dark" : "light";
    for (const name of ["ink", "muted", "faint", "background"]) {
      this.element.style.setProperty(`--nv-${name}`, this.theme[name]);
    }
    this._redraw();
  }

  _stepBy(count) {
    this.pause();
    this.seek(this.index + count);
  }

  _scrub(index) {
    this.pause();
    this.seek(index);
  }

  _togglePlay() {
    if (this.playing) this.pause();
    else this.play();
  }

  /** Keys of other parts of the page are theirs: of fields and of what scrolls. */
  _isForOthers({ target }) {
    if (this.element.contains(target)) return false;
    return !this.element.offsetParent || target.closest("input, textarea, select, dialog, [role=tab], [tabindex]");
  }

  _key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented || !this._hasRecords()) return;
    if (this._isForOthers(event)) return;
    const own = event.target.tagName; // a button presses itself on space; a slider and a list move by arrows
    const actions = {
      Escape: () => this.select(null),
      " ": own !== "BUTTON" && own !== "SELECT" && (() => this._togglePlay()),
      ArrowLeft: own !== "SELECT" && (() => this._stepBy(-1)),
      ArrowRight: own !== "SELECT" && (() => this._stepBy(1)),
      Home: own !== "SELECT" && (() => this._scrub(this.history.first)),
      End: own !== "SELECT" && (() => (this.live ? this.follow() : this._scrub(this.history.length - 1))),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  _point(view, event) {
    this._setHover(this._regionAt(view, event));
  }

  _setHover(region) {
    if (sameRegion(region, this.hover)) return;
    this.hover = region;
    this.element.classList.toggle("nv-pointing", region !== null);
    this._redraw();
  }

  _click(view, event) {
    const region = this._regionAt(view, event);
    if (region?.kind === "step") this._scrub(region.index);
    else this.select(sameRegion(region, this.selection) ? null : region);
  }

  _regionAt(view, event) {
    const box = view.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = view.regions.findLast((r) => x >= r.x && x < r.x + r.width && y >= r.y && y < r.y + r.height);
    return hit ? { kind: hit.kind, id: hit.id, index: hit.index } : null;
  }

  // ---------------------------------------------------------------- drawing, at most once a frame of the screen

  _redraw() {
    this.stale = true;
    this._nextFrame();
  }

  _nextFrame() {
    this.frame ||= requestAnimationFrame((now) => this._onFrame(now));
  }

  _onFrame(now) {
    this.frame = 0;
    if (this.playing) this._advance(now);
    if (this.stale) this._draw(now);
  }

  /** Draw as soon as that keeps to `LIVE_SHARE`. */
  _redrawInTime() {
    this.stale = true;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const interval = Math.max(Math.min(this.drawingTime / LIVE_SHARE, LONGEST_INTERVAL), calm ? CALM_INTERVAL : 0);
    const draw = () => {
      this.later = null;
      this._nextFrame();
    };
    this.later ??= setTimeout(draw, this.lastDrawn + interval - performance.now());
  }

  _draw(now) {
    this.stale = false;
    this.lastDrawn = now;
    this._showControls();
    if (!this.history) return;
    if (this.hover?.index < this.history.first) this.hover = null; // a step that was dropped meanwhile
    const begin = performance.now();
    for (const view of this.views) if (view.visible || !this._hasItsWidth(view)) this._drawView(view);
    this.story.show(this.history, this.index, this.hover ?? this.selection, this.theme);
    this.drawingTime += (performance.now() - begin - this.drawingTime) / 4;
  }

  _advance(now) {
    const last = this.history.length - 1;
    let wanted = this.index;
    let turns = ((now - this.lastPlayed) * this.speed) / 1000;
    while (wanted < last && turns >= this._turns(wanted)) turns -= this._turns(wanted++);
    if (wanted > this.index) {
      this.lastPlayed = now - (turns * 1000) / this.speed;
      this.seek(wanted);
    }
    if (this.index >= last) this.pause();
    else this._nextFrame();
  }

  /** A picture grows at once. It shrinks only while it follows a live engine, and late: what lies below must not jump. */
  _fitHeight(view, needed) {
    const loose = this.following && needed < view.height;
    view.looseSince = loose ? (view.looseSince ?? this.lastDrawn) : null;
    const wait = this._hasRecords() && this.history.record(this.index).size ? SHRINK_AFTER : SHRINK_IDLE;
    const late = loose && !this.hover && this.lastDrawn - view.looseSince >= wait;
    view.height = late ? needed : Math.max(view.height, needed);
    if (late) view.looseSince = null;
    else if (loose) this.shrinking ??= setTimeout(() => this._drawAgain(), SHRINK_IDLE);
  }

  _drawAgain() {
    this.shrinking = null;
    this._redraw();
  }

  _drawView(view) {
    const width = Math.floor(view.figure.clientWidth);
    if (width !== view.width) view.height = 0;
    view.width = width;
    if (width === 0) return; // hidden; the observer tells when it is shown again
    this._fitHeight(view, Math.ceil(view.drawing.height(this.history, width, this.index)));
    const ratio = devicePixelRatio || 1;
    const [columns, rows] = [Math.round(width * ratio), Math.round(view.height * ratio)];
    if (view.canvas.width !== columns || view.canvas.height !== rows) {
      Object.assign(view.canvas, { width: columns, height: rows });
      Object.assign(view.canvas.style, { width: `${width}px`, height: `${view.height}px` });
    }
    const context = view.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, view.height);
    const { history, index, selection, hover, theme, following, settings } = this;
    const scene = { history, index, selection, hover, theme, follow: following, settings };
    view.regions = view.drawing.draw(context, { width, height: view.height }, scene);
    const words = this._hasRecords() ? this._describe() : "nothing has been recorded yet";
    view.canvas.setAttribute("aria-label", `${view.drawing.title}, ${words}`);
  }
}

function sameRegion(one, other) {
  return one?.kind === other?.kind && one?.id === other?.id && one?.index === other?.index;
}
