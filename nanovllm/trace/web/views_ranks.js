// One timeline per rank: when each step was ordered, when the rank computed, waited and communicated, and when it answered.
// Long ones are shown a window at a time.
import { MILLISECOND, markOf } from "./ranks.js";
import {
  FONT, clamp, drawRankAnswer, drawRankOrder, drawRankPhase, drawState, drawTokens, drawTransferring, isSame, makeView, outlineFocus,
  writeText,
} from "./views_style.js";

const RANK_ROW = 32;
const RANK_BAR = 23;
const ABOVE = 10;
const TIME_AXIS = 24;
const THINNEST_STEP = 9; // pixels; with more steps than fit, a window is shown
const MOST_SHARES = 6; // a step of more requests is one bar, in the colour of its first one
const MOST_ORDERS = 60; // more would hide the bars
const WIDE = 620; // pixels; narrower pictures leave the states to the text below them
const RANK_MARKS = ["order", "prefill", "decode", "dummy step", "waiting", "communicates", "receives KV", "answer"];

let gauge = null; // a context to measure names with

function nameWidth(rows) {
  gauge ??= document.createElement("canvas").getContext("2d");
  gauge.font = `12px ${FONT}`;
  return Math.max(...rows.map((row) => gauge.measureText(row.name).width));
}

/** Where times are: those `from` to `to` between `left` and `right`. */
export function rankWindow(history, width, index) {
  const left = Math.ceil(Math.min(nameWidth(history.rows) + 14, width * 0.35));
  const right = width - (width >= WIDE ? 100 : 14);
  const steps = Math.max(...history.rows.map((row) => row.spans.filter((span) => span.kind !== "wait").length));
  const shown = history.duration * Math.min(1, (right - left) / (THINNEST_STEP * steps));
  const from = clamp(history.record(index).time - 0.7 * shown, 0, history.duration - shown);
  const x = (time) => left + ((time - from) / shown) * (right - left);
  return { left, right, from, to: from + shown, x };
}

export const RANKS_VIEW = makeView({
  title: "Timeline of each rank",
  nothing: "What each rank did when",
  marks: RANK_MARKS,
  legend: ({ seen }) => RANK_MARKS.filter((mark) => seen.has(mark)),
  height: (history) => ABOVE + history.rows.length * RANK_ROW + TIME_AXIS,
  draw(ctx, { width }, scene) {
    const { history, index, theme } = scene;
    const window = rankWindow(history, width, index);
    const now = history.record(index).time;
    const bottom = ABOVE + history.rows.length * RANK_ROW;
    const regions = momentRegions(history, window, bottom);
    ctx.save();
    ctx.beginPath();
    ctx.rect(window.left - 5, 0, window.right - window.left + 10, bottom);
    ctx.clip();
    history.rows.forEach((row, number) => drawRow(ctx, scene, row, ABOVE + (number + 0.5) * RANK_ROW, window, regions));
    ctx.globalAlpha = 0.75;
    ctx.fillStyle = theme.background;
    ctx.fillRect(window.x(now), 0, window.right + 5 - window.x(now), bottom);
    ctx.restore();
    drawTimes(ctx, scene, window, bottom);
    history.rows.forEach((row, number) => {
      const y = ABOVE + (number + 0.5) * RANK_ROW;
      const bold = isSame(scene.selection, "rank", row.name) || isSame(scene.hover, "rank", row.name);
      writeText(ctx, row.name, 4, y, { color: theme.ink, width: window.left - 10, bold });
      regions.push({ x: 0, y: y - RANK_ROW / 2, width: window.left, height: RANK_ROW, kind: "rank", id: row.name });
      if (width >= WIDE) writeText(ctx, history.stateAt(row, now), window.right + 10, y, { color: theme.ink });
    });
    return regions;
  },
});

/** Where a click leads to a moment: from it to the next one. */
function momentRegions(history, window, bottom) {
  const regions = [];
  for (let at = 0; at < history.length; at++) {
    const { time } = history.record(at);
    const next = at + 1 < history.length ? history.record(at + 1).time : history.duration;
    if (next < window.from || time > window.to) continue;
    const x = Math.max(window.left, window.x(time));
    const end = Math.min(window.right, window.x(next));
    regions.push({ x, y: 0, width: Math.max(2, end - x), height: bottom + TIME_AXIS, kind: "step", index: at });
  }
  return regions;
}

function drawRow(ctx, scene, row, y, window, regions) {
  const { theme } = scene;
  const isShown = (time) => time >= window.from && time <= window.to;
  for (const span of row.spans) {
    if (span.end < window.from || span.begin > window.to) continue;
    const x = window.x(span.begin);
    drawSpan(ctx, scene, span, { x, y: y - RANK_BAR / 2, width: window.x(span.end) - x, height: RANK_BAR }, regions);
  }
  const [orders, answers] = [row.orders.filter(isShown), row.answers.filter(isShown)];
  if (orders.length > MOST_ORDERS) return;
  for (const time of answers) drawRankAnswer(ctx, theme, window.x(time), y, RANK_BAR + 6);
  for (const time of orders) drawRankOrder(ctx, theme, window.x(time), y - RANK_BAR / 2 + 3);
}

function drawSpan(ctx, scene, { kind, shares }, box, regions) {
  const { theme, history } = scene;
  const { x, y, width, height } = box;
  if (kind === "wait") return drawState(ctx, theme, "waiting", x, x + width, y + height / 2, 0);
  if (kind === "communicate") return drawRankPhase(ctx, theme, "communicates", x, y, width, height);
  if (kind === "read") return drawTransferring(ctx, theme, x, y, width, height);
  if (!shares.length) return drawRankPhase(ctx, theme, "dummy step", x, y, width, height);
  const shown = shares.length > MOST_SHARES ? shares.slice(0, 1) : shares;
  const high = height / shown.length;
  shown.forEach(([id, tokens], number) => {
    const part = { x, y: y + number * high, width: Math.max(0.6, width), height: high };
    drawTokens(ctx, theme, markOf(tokens), part.x, part.y, part.width, part.height, history.requests.get(id).number);
    if (shares.length > MOST_SHARES) return;
    outlineFocus(ctx, scene, "request", id, part);
    regions.push({ ...part, kind: "request", id });
  });
  return undefined;
}

/** Ticks with milliseconds, and the moment that is shown. */
function drawTimes(ctx, { history, index, theme }, window, bottom) {
  const { time: now } = history.record(index);
  const apart = (64 * (window.to - window.from)) / (window.right - window.left) / MILLISECOND;
  const power = 10 ** Math.floor(Math.log10(apart));
  const every = [1, 2, 5, 10].find((n) => n * power >= apart) * power;
  ctx.fillStyle = theme.faint;
  ctx.fillRect(window.left, bottom, window.right - window.left, 1);
  for (let tick = Math.ceil(window.from / MILLISECOND / every); tick * every * MILLISECOND <= window.to; tick++) {
    const x = window.x(tick * every * MILLISECOND);
    ctx.fillStyle = theme.muted;
    ctx.fillRect(x, bottom, 1, 4);
    if (Math.abs(x - window.x(now)) < 52) continue;
    writeText(ctx, String(Number((tick * every).toPrecision(6))), x, bottom + 14, { color: theme.muted, size: 11, align: "center" });
  }
  ctx.fillStyle = theme.ink;
  ctx.fillRect(window.x(now) - 0.75, 0, 1.5, bottom + 4);
  const label = `${history.inMilliseconds(now)} ms`;
  writeText(ctx, label, clamp(window.x(now), 24, window.right - 16), bottom + 14, { color: theme.ink, size: 11, bold: true, align: "center" });
}
