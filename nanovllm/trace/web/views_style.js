// Colours and marks of the visual language (the docstring of nanovllm/lab/viz/__init__.py says what they mean),
// and small helpers to draw with them on a canvas. Sizes are CSS pixels.

export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
// Of views with steps on their x axis, so that they stand in line.
export const MARGIN = { left: 86, right: 14 };

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// `color` with `share` (0 to 1) of `other` in it, as hex.
export function mixColors(color, other, share) {
  const [from, to] = [channels(color), channels(other)];
  return `#${from.map((c, i) => Math.round(c + (to[i] - c) * share).toString(16).padStart(2, "0")).join("")}`;
}

// "11,650".
export function inDigits(number) {
  return number.toLocaleString("en");
}

export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// Text no wider than `width`, with an ellipsis where it was cut.
export function fitText(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let kept = text.length - 1;
  while (kept > 0 && ctx.measureText(`${text.slice(0, kept)}…`).width > width) kept -= 1;
  return kept > 0 ? `${text.slice(0, kept)}…` : "";
}

// Write text; `width` cuts it. Default: left-aligned, vertically centred on y, 12 pixels.
export function writeText(ctx, text, x, y, { color, size = 12, align = "left", bold = false, width } = {}) {
  ctx.font = `${bold ? "600 " : ""}${size}px ${FONT}`;
  ctx.fillStyle = color;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillText(width === undefined ? text : fitText(ctx, text, width), x, y);
}

// The colours of one theme. Requests are given by their number, in order of appearance: 24 in a row differ.
export class Theme {
  #cache = new Map();

  constructor(name, { palette, further = [] }, { ink, muted, faint, background }) {
    const darker = palette.map((color) => mixColors(color, "#000000", 0.4));
    Object.assign(this, { name, colors: [...palette, ...darker, ...further], ink, muted, faint, background, dark: name === "dark" });
  }

  #remember(key, make) {
    if (!this.#cache.has(key)) this.#cache.set(key, make());
    return this.#cache.get(key);
  }

  fill(number) {
    return this.colors[number % this.colors.length];
  }

  // The solid edge: on a dark page lighter than the fill, so that dark blues stay visible.
  rim(number) {
    if (!this.dark) return this.fill(number);
    return this.#remember(`rim ${number % this.colors.length}`, () => mixColors(this.fill(number), "#FFFFFF", 0.45));
  }

  // The light version of a colour, which stands for decode: mixed with the background.
  pale(number) {
    const share = this.dark ? 0.55 : 0.65;
    return this.#remember(`pale ${number % this.colors.length}`, () => mixColors(this.fill(number), this.background, share));
  }

  // The colour in which tokens of a kind are filled: an accepted draft is between prefill and decode, a rejected one fades.
  ofTokens(kind, number) {
    if (kind === "prefill") return this.fill(number);
    if (kind === "decode") return this.pale(number);
    const share = kind === "accepted draft" ? 0.3 : 0.8;
    return this.#remember(`${kind} ${number % this.colors.length}`, () => mixColors(this.fill(number), this.background, share));
  }

  // Black or white, whichever reads better on the colour (contrast as in WCAG 2).
  inkOn(color) {
    return this.#remember(`ink ${color}`, () => {
      const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
      const [r, g, b] = channels(color).map((c) => linear(c / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.25 ? "#222222" : "#FFFFFF";
    });
  }

  // Diagonal hatching as a fill, or `crossed`.
  hatch(ctx, color, crossed = false) {
    return this.#remember(`hatch ${color} ${crossed}`, () => {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const pen = tile.getContext("2d");
      pen.fillStyle = this.background;
      pen.fillRect(0, 0, 6, 6);
      pen.strokeStyle = color;
      pen.lineWidth = 1.5;
      pen.beginPath();
      for (const shift of [-6, 0, 6]) {
        pen.moveTo(shift - 1, 7);
        pen.lineTo(shift + 7, -1);
        if (!crossed) continue;
        pen.moveTo(shift - 1, -1);
        pen.lineTo(shift + 7, 7);
      }
      pen.stroke();
      return ctx.createPattern(tile, "repeat");
    });
  }
}

// Tokens of a kind as a box, in the colours of request `number`.
export function drawTokens(ctx, theme, kind, x, y, width, height, number) {
  const fill = kind === "cached" ? theme.hatch(ctx, theme.rim(number)) : theme.ofTokens(kind, number);
  const fades = kind === "rejected draft";
  outlineBox(ctx, x, y, width, height, fill, fades ? fill : theme.rim(number));
  if (fades && width > 5 && height > 5) dashBox(ctx, theme.rim(number), x, y, width, height);
}

// A box with an edge of one pixel inside its bounds; one that is too thin for an edge has none.
export function outlineBox(ctx, x, y, width, height, fill, edge) {
  const thin = width <= 2 || height <= 2;
  ctx.fillStyle = thin ? fill : edge;
  ctx.fillRect(x, y, width, height);
  if (thin || fill === edge) return;
  ctx.fillStyle = fill;
  ctx.fillRect(x + 1, y + 1, width - 2, height - 2);
}

export function dashBox(ctx, color, x, y, width, height) {
  ctx.strokeStyle = color;
  ctx.lineWidth = 1;
  ctx.setLineDash([2, 2]);
  ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  ctx.setLineDash([]);
}

// A share's tokens by their marks (`StepRecord.parts`) from left to right, `size` pixels each; the last `gap` pixels stay free.
export function drawParts(ctx, theme, parts, x, y, size, height, number, gap = 0) {
  parts.forEach(([kind, count], i) => {
    const wide = count * size - (i === parts.length - 1 ? gap : 0);
    drawTokens(ctx, theme, kind, x, y, Math.max(0.6, wide), height, number);
    x += count * size;
  });
}

// How many tokens of each kind a step computes, "32 prefill, 5 decode, 9 drafted".
export function tokensByKind(record) {
  const { numTokens, numDecode, numDrafts } = record;
  const drafted = numDrafts ? `, ${inDigits(numDrafts)} drafted` : "";
  return `${inDigits(numTokens - numDecode - numDrafts)} prefill, ${numDecode} decode${drafted}`;
}

const LINES = {
  waiting: { width: 1.5, dash: [1.5, 2.5] },
  stalled: { width: 1.6, dash: [] },
  swapped: { width: 4, dash: [6, 3] },
};

// A request that computes nothing, as a line.
export function drawState(ctx, theme, kind, from, to, y, number) {
  ctx.strokeStyle = kind === "waiting" ? theme.muted : theme.rim(number);
  ctx.lineWidth = LINES[kind].width;
  ctx.setLineDash(LINES[kind].dash);
  ctx.beginPath();
  ctx.moveTo(from, y);
  ctx.lineTo(to, y);
  ctx.stroke();
  ctx.setLineDash([]);
}

// Something that happened at (x, y). The tip of the triangle of a first token is the point it marks.
export function drawEvent(ctx, theme, kind, x, y, size) {
  ctx.fillStyle = ctx.strokeStyle = theme.ink;
  ctx.lineWidth = size > 7 ? 2.2 : 1.6;
  const half = size / 2;
  ctx.beginPath();
  if (kind === "first token") {
    ctx.moveTo(x, y);
    ctx.lineTo(x - half, y - size);
    ctx.lineTo(x + half, y - size);
    ctx.closePath();
    ctx.fill();
    ctx.strokeStyle = theme.background;
    ctx.lineWidth = 0.75;
  } else if (kind === "preempted") {
    ctx.moveTo(x - half, y - half);
    ctx.lineTo(x + half, y + half);
    ctx.moveTo(x - half, y + half);
    ctx.lineTo(x + half, y - half);
  } else if (kind === "finished") {
    ctx.moveTo(x, y - half - 1);
    ctx.lineTo(x, y + half + 1);
  } else {
    ctx.rect(x - half * 0.8, y - half * 0.8, size * 0.8, size * 0.8);
  }
  ctx.stroke();
}

const TOKEN_KINDS = new Set(["prefill", "decode", "accepted draft", "rejected draft", "cached"]);
export const DRAFT_MARKS = ["accepted draft", "rejected draft"];
const LEGEND_WORDS = {
  free: "free block",
  cached: "from the prefix cache",
  "cached block": "free, still cached",
  "in transfer": "being received, or read by a peer",
  overwritten: "evicts cached content",
};

function legendWord(kind) {
  return LEGEND_WORDS[kind] ?? kind;
}

let ruler = null; // a context to measure with, before there is one to draw on

function legendWidth(kind) {
  ruler ??= document.createElement("canvas").getContext("2d");
  ruler.font = `12px ${FONT}`;
  return 29 + Math.ceil(ruler.measureText(legendWord(kind)).width) + 18;
}

// Where the entries of a legend stand, in lines.
function legendPlaces(kinds, width) {
  const places = [];
  let [x, line] = [0, 0];
  for (const kind of kinds) {
    const wide = legendWidth(kind);
    if (x > 0 && x + wide - 18 > width) [x, line] = [0, line + 1];
    places.push({ kind, x, line });
    x += wide;
  }
  return places;
}

function legendHeight(kinds, width) {
  return kinds.length ? 10 + 20 * (legendPlaces(kinds, width).at(-1).line + 1) : 0;
}

// The marks in grey, with their names.
function drawLegend(ctx, theme, kinds, x, y, width) {
  const gray = new Theme(theme.name, { palette: [theme.muted] }, theme);
  for (const { kind, x: shift, line } of legendPlaces(kinds, width)) {
    const [left, middle] = [x + shift, y + 18 + line * 20];
    drawLegendMark(ctx, theme, gray, kind, left, middle);
    writeText(ctx, legendWord(kind), left + 29, middle, { color: theme.ink });
  }
}

function drawLegendMark(ctx, theme, gray, kind, x, y) {
  const box = [x + 3, y - 6, 18, 12];
  if (TOKEN_KINDS.has(kind)) drawTokens(ctx, gray, kind, ...box, 0);
  else if (kind === "free") outlineBox(ctx, ...box, theme.background, theme.faint);
  else if (kind === "cached block") outlineBox(ctx, ...box, gray.hatch(ctx, theme.muted), theme.muted);
  else if (kind === "in transfer") drawTransferring(ctx, theme, ...box);
  else if (kind === "read") outlineBox(ctx, ...box, gray.pale(0), gray.pale(0));
  else if (kind === "written now") outlineBox(ctx, ...box, theme.muted, theme.muted);
  else if (kind in LINES) drawState(ctx, gray, kind, x, x + 24, y, 0);
  else if (kind === "token budget" || kind === "size of the pool") drawLimit(ctx, theme, x, x + 24, y);
  else if (kind === "new block") drawFresh(ctx, theme, "allocated", x + 6, y - 6, 12, theme.muted);
  else if (kind === "prefix hit") drawFresh(ctx, theme, "hit", x + 6, y - 6, 12, theme.muted);
  else if (kind === "overwritten") drawFresh(ctx, theme, "evicted", x + 6, y - 6, 12, theme.muted);
  else if (kind === "dummy step" || kind === "communicates") drawRankPhase(ctx, theme, kind, ...box);
  else if (kind === "receives KV") drawTransferring(ctx, theme, ...box);
  else if (kind === "order") drawRankOrder(ctx, theme, x + 12, y + 4);
  else if (kind === "answer") drawRankAnswer(ctx, theme, x + 12, y, 14);
  else drawEvent(ctx, theme, kind, x + 12, kind === "first token" ? y + 5 : y, 9);
}

// A phase of a rank in which it computes no request's tokens.
export function drawRankPhase(ctx, theme, kind, x, y, width, height) {
  if (kind === "communicates") outlineBox(ctx, x, y, width, height, theme.hatch(ctx, theme.muted, true), theme.muted);
  else if (width <= 2) outlineBox(ctx, x, y, width, height, theme.muted, theme.muted);
  else dashBox(ctx, theme.muted, x, y, width, height);
}

// When a rank was ordered to compute a step: a triangle, whose tip is the moment.
export function drawRankOrder(ctx, theme, x, y) {
  ctx.fillStyle = theme.ink;
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x - 4, y - 7);
  ctx.lineTo(x + 4, y - 7);
  ctx.fill();
}

// When a rank has answered.
export function drawRankAnswer(ctx, theme, x, y, height) {
  ctx.fillStyle = theme.ink;
  ctx.fillRect(x - 0.75, y - height / 2, 1.5, height);
}

// A block that only KV transfers hold: dots.
export function drawTransferring(ctx, theme, x, y, width, height) {
  outlineBox(ctx, x, y, width, height, theme.background, theme.muted);
  const pitch = Math.max(3, width / 5);
  ctx.fillStyle = theme.ink;
  for (let down = pitch / 2; down < height; down += pitch) {
    for (let right = pitch / 2; right < width; right += pitch) ctx.fillRect(x + right - 0.75, y + down - 0.75, 1.5, 1.5);
  }
}

// A limit, as a dashed line.
export function drawLimit(ctx, theme, from, to, y) {
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 1.3;
  ctx.setLineDash([5, 3]);
  ctx.beginPath();
  ctx.moveTo(from, y);
  ctx.lineTo(to, y);
  ctx.stroke();
  ctx.setLineDash([]);
}

// What happened to a block in this step, around and on its square: "allocated" is ringed, "hit" glows,
// "evicted" is ringed and loses a corner. Squares below 8 pixels get a dot instead.
export function drawFresh(ctx, theme, what, x, y, side, color) {
  if (side < 8) {
    const dot = Math.max(1, side / 3);
    ctx.fillStyle = what === "hit" ? theme.background : theme.ink;
    ctx.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
    return;
  }
  if (what === "hit") {
    ctx.globalAlpha = 0.4;
    ctx.strokeStyle = color;
    ctx.lineWidth = 5;
    ctx.strokeRect(x - 2, y - 2, side + 4, side + 4);
    ctx.globalAlpha = 1;
  } else {
    ctx.strokeStyle = theme.ink;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x - 1.75, y - 1.75, side + 3.5, side + 3.5);
  }
  if (what === "evicted") {
    ctx.fillStyle = theme.ink;
    ctx.beginPath();
    ctx.moveTo(x + side, y);
    ctx.lineTo(x + side, y + side * 0.4);
    ctx.lineTo(x + side * 0.6, y);
    ctx.fill();
  }
}

// A view as the player wants it. Given are its title, the words for when there is `nothing` to show, the
// marks that its legend may explain and those that it needs for a history (those of drafts only if there are any), the
// height of the picture (without the legend), and `draw(ctx, size, scene)`, which draws it and returns its regions. Where the legend `follows`, it
// is right below them, though the picture may be higher.
export function makeView({ title, nothing, marks = [], legend = () => marks, height, draw, follows = () => false }) {
  const isEmpty = (history) => history.length === history.first;
  const needed = (history) => legend(history).filter((mark) => !DRAFT_MARKS.includes(mark) || history.seen.has("drafts"));
  const below = (history, width) => (isEmpty(history) ? 0 : legendHeight(needed(history), width - 8));
  return {
    title,
    legend: marks,
    height(history, width, index) {
      return isEmpty(history) ? 44 : height(history, width, index) + below(history, width);
    },
    draw(ctx, { width, height: whole }, scene) {
      const { history, theme } = scene;
      ctx.fillStyle = theme.background; // pale colours are mixed with it
      ctx.fillRect(0, 0, width, whole);
      if (isEmpty(history)) {
        const look = { color: theme.muted, width: width - 8 };
        writeText(ctx, nothing, 4, 14, look);
        writeText(ctx, "will be here once steps are recorded.", 4, 32, look);
        return [];
      }
      const bottom = whole - below(history, width);
      const regions = draw(ctx, { width, height: bottom }, scene);
      const end = follows(history) ? Math.max(30, ...regions.map((r) => r.y + r.height)) : bottom;
      drawLegend(ctx, theme, needed(history), 4, Math.min(end, bottom), width - 8);
      return regions;
    },
  };
}

// An edge around what the reader points at.
export function outlineFocus(ctx, { theme, hover, selection }, kind, id, { x, y, width, height }) {
  if (!isSame(hover, kind, id) && !isSame(selection, kind, id)) return;
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 2;
  ctx.strokeRect(x - 1, y - 1, width + 2, height + 2);
}

export function isSame(region, kind, id) {
  return region?.kind === kind && (kind === "step" ? region.index : region.id) === id;
}
