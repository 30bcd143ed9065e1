// Views of single steps and of what is summed up over steps: the token budget, the queues, the use of the
// pool.
import {
  DRAFT_MARKS, MARGIN, drawEvent, drawLimit, drawParts, inDigits, makeView, mixColors, outlineFocus, tokensByKind, writeText,
} from "./views_style.js";
import { drawAxis, stepWindow, veilFuture } from "./views_timeline.js";

const AXIS_HEIGHT = 22;
const BAR_ENDS = [16, 64, 256, 1024, 4096, 16_384]; // tokens
const FLAT = 0.4; // the share of a limit below which the limit would press what is drawn flat

export const BUDGET_VIEW = makeView({
  title: "Token budget",
  nothing: "How each step spends its token budget",
  marks: ["prefill", "decode", ...DRAFT_MARKS, "token budget"],
  height: () => 76 + 96 + AXIS_HEIGHT,
  draw(ctx, { width, height }, scene) {
    const regions = drawBudgetHistory(ctx, scene, width, 80, height - AXIS_HEIGHT);
    return [...regions, ...drawBudgetBar(ctx, scene, width)];
  },
});

/** The flag that holds a step below the token budget of all steps, in parentheses; "" if nothing does. */
export function lowerLimit(history, record) {
  return record.tokenBudget < (history.settings.token_budget ?? 0) ? " (--max-step-ms)" : "";
}

// The current step as a bar, filled in the order in which tokens are packed. Its end is the budget; where little of that is
// used, the bar is drawn to a smaller scale, is open at its end, and both numbers are named.
function drawBudgetBar(ctx, scene, width) {
  const { history, index, theme } = scene;
  const record = history.record(index);
  const { numTokens, tokenBudget: budget } = record;
  const words = `step ${record.step}: ${inDigits(numTokens)} tokens (${tokensByKind(record)})`;
  writeText(ctx, words, 4, 12, { color: theme.ink, width: width - 8 });
  const end = BAR_ENDS.find((each) => each >= numTokens && each <= 0.25 * budget) ?? Math.max(1, budget, numTokens);
  const plot = width - 8;
  const scale = plot / end;
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 1.3;
  ctx.setLineDash([5, 3]);
  ctx.beginPath();
  ctx.moveTo(3.5 + plot, 26.5);
  ctx.lineTo(4.5, 26.5);
  ctx.lineTo(4.5, 53.5);
  ctx.lineTo(3.5 + plot, 53.5);
  if (end >= budget) ctx.closePath();
  ctx.stroke();
  ctx.setLineDash([]);
  const look = { color: theme.muted, size: 11 };
  const tokens = `budget: ${inDigits(budget)} tokens${lowerLimit(history, record)}`;
  const limit = end < budget ? `${inDigits(end)}; ${tokens}` : tokens;
  writeText(ctx, "0", 4, 63, look);
  writeText(ctx, limit, 4 + plot, 63, { ...look, align: "right" });
  const regions = [];
  let x = 4;
  for (let row = 0; row < record.size; row++) {
    const { number, label } = history.requests.get(record.ids[row]);
    const wide = record.counts[row] * scale;
    const parts = record.parts(row);
    drawParts(ctx, theme, parts, x, 27, scale, 26, number, wide > 4 ? 1 : 0);
    const [kind, count] = parts[0]; // the part that carries the name
    const room = count * scale;
    if (room > 24) {
      const color = kind === "decode" ? theme.ink : theme.inkOn(theme.fill(number));
      const text = room > 60 ? `${label}: ${record.counts[row]}` : String(record.counts[row]);
      writeText(ctx, text, x + room / 2, 40.5, { color, align: "center", width: room - 4 });
    }
    regions.push({ x, y: 27, width: wide, height: 26, kind: "request", id: record.ids[row] });
    x += wide;
  }
  for (const region of regions) outlineFocus(ctx, scene, "request", region.id, region);
  return regions;
}

function drawBudgetHistory(ctx, scene, width, top, bottom) {
  const { history, index, theme, follow } = scene;
  const window = stepWindow(history, width, index, follow);
  const regions = [];
  let [highest, budget] = [1, 0];
  for (let at = window.from; at < window.to; at++) {
    highest = Math.max(highest, history.record(at).numTokens);
    budget = Math.max(budget, history.record(at).tokenBudget);
  }
  const full = budget && highest > FLAT * budget;
  const most = full ? Math.max(budget, highest) : highest;
  const scale = (bottom - top - 8) / most;
  for (let at = window.from; at < window.to; at++) {
    drawStack(ctx, theme, history, history.record(at), window.x(at), bottom, window.cell, scale);
  }
  drawScale(ctx, theme, most, "tokens", top + 8, bottom);
  veilFuture(ctx, theme, scene, window, top, bottom);
  if (full) drawLimit(ctx, theme, MARGIN.left, window.right, bottom - budget * scale);
  else nameLimit(ctx, theme, `budget: ${inDigits(budget)} ↑`, top - 5);
  drawAxis(ctx, theme, scene, window, top, bottom, regions);
  return regions;
}

function drawStack(ctx, theme, history, record, x, bottom, cell, scale) {
  const wide = cell > 6 ? cell - 1 : cell;
  const low = record.size > 0 && record.numTokens * scale < 2; // would hardly be seen
  if (low) {
    ctx.fillStyle = theme.muted;
    ctx.fillRect(x, bottom - 2, wide, 2);
    return;
  }
  let y = bottom;
  for (let row = 0; row < record.size; row++) {
    const { number } = history.requests.get(record.ids[row]);
    for (const [kind, count] of record.parts(row)) {
      y -= count * scale;
      ctx.fillStyle = theme.ofTokens(kind, number);
      ctx.fillRect(x, y, wide, count * scale);
    }
    if (record.decodes[row] && record.counts[row] * scale > 4) {
      ctx.fillStyle = theme.rim(number);
      ctx.fillRect(x, y, wide, 1);
    }
  }
}

// A limit that is above what is drawn.
function nameLimit(ctx, theme, text, y) {
  writeText(ctx, text, MARGIN.left, y, { color: theme.muted, size: 11 });
}

// The ends of the y axis, and what it counts.
function drawScale(ctx, theme, most, what, top, bottom) {
  const right = MARGIN.left - 6;
  const look = { color: theme.muted, size: 11, align: "right", width: right - 2 };
  writeText(ctx, inDigits(most), right, top, look);
  writeText(ctx, what, right, (top + bottom) / 2, look);
  writeText(ctx, "0", right, bottom - 5, look);
}

// ---------------------------------------------------------------- use of the pool

export const USAGE_VIEW = makeView({
  title: "Blocks in use",
  nothing: "How many blocks requests hold, step by step",
  marks: ["size of the pool", "preempted"],
  legend: ({ seen }) => (seen.has("preempted") ? ["size of the pool", "preempted"] : ["size of the pool"]),
  height: () => 115 + AXIS_HEIGHT,
  draw(ctx, { width, height }, scene) {
    const { history, index, theme, follow } = scene;
    const [top, bottom] = [15, height - AXIS_HEIGHT];
    const window = stepWindow(history, width, index, follow);
    const pool = history.record(window.to - 1).numBlocks || 1;
    let peak = 1;
    for (let at = window.from; at < window.to; at++) {
      peak = Math.max(peak, history.record(at).numBlocks - history.record(at).numFree);
    }
    const most = peak > FLAT * pool ? pool : peak;
    const y = (blocks) => bottom - ((bottom - top) * blocks) / most;
    drawHeld(ctx, theme, history, window, y, bottom);
    drawScale(ctx, theme, most, "blocks", top, bottom);
    for (let at = window.from; at < window.to; at++) {
      const { preempted, numBlocks, numFree } = history.record(at);
      if (preempted.size) drawEvent(ctx, theme, "preempted", window.x(at), y(numBlocks - numFree), 7);
    }
    veilFuture(ctx, theme, scene, window, 0, bottom);
    if (most === pool) drawLimit(ctx, theme, MARGIN.left, window.right, top);
    else nameLimit(ctx, theme, `pool: ${inDigits(pool)} ↑`, 7);
    const regions = [];
    drawAxis(ctx, theme, scene, window, 4, bottom, regions);
    return regions;
  },
});

function drawHeld(ctx, theme, history, window, y, bottom) {
  const color = theme.rim(0);
  const path = new Path2D();
  path.moveTo(window.x(window.from), bottom);
  for (let at = window.from; at < window.to; at++) {
    const record = history.record(at);
    const level = y(record.numBlocks - record.numFree);
    path.lineTo(window.x(at), level);
    path.lineTo(window.x(at + 1), level);
  }
  const area = new Path2D(path);
  area.lineTo(window.right, bottom);
  area.closePath();
  ctx.fillStyle = mixColors(theme.fill(0), theme.background, 0.72);
  ctx.fill(area);
  ctx.strokeStyle = color;
  ctx.lineWidth = 1.6;
  ctx.stroke(path);
}

// ---------------------------------------------------------------- queues

const QUEUES = ["waiting", "running", "swapped"];
const CHIP = 22;

// Why the next request in line is not admitted.
const BLOCKED_BY = {
  "kv blocks": "too few blocks are free",
  max_num_seqs: "as many requests run as max_num_seqs allows",
  max_num_batched_tokens: "the token budget of this step is spent",
  max_step_ms: "this step has as many prompt tokens as max_step_ms allows",
  preemption: "a request was preempted in this step",
  "static batch": "the running batch admits no more requests",
  pipeline_parallel_size: "the other pipeline stages' steps get the rest",
};

// In a sentence: which queue waits for the next step, and why; "" if no request is in line.
export function whyNotAdmitted({ blockedBy, waiting, swapped }) {
  if (!blockedBy) return "";
  const from = waiting.length && swapped.length ? "" : swapped.length ? "swapped " : "waiting ";
  return `The next ${from}request is not admitted: ${BLOCKED_BY[blockedBy] ?? blockedBy}.`;
}

export const QUEUES_VIEW = makeView({
  title: "Queues",
  nothing: "The requests that wait, run and are swapped out",
  height: () => QUEUES.length * 32 + 30,
  draw(ctx, { width }, scene) {
    const { theme } = scene;
    const record = scene.history.record(scene.index);
    const regions = [];
    QUEUES.forEach((name, i) => drawQueue(ctx, scene, name, record[name], 20 + i * 32, width, regions));
    const reason = whyNotAdmitted(record);
    const color = reason ? theme.ink : theme.muted;
    writeText(ctx, reason || "No request is kept waiting.", 4, QUEUES.length * 32 + 18, { color, width: width - 8 });
    return regions;
  },
});

// A queue as a row of chips, first in line first: with their names if they fit, else as squares, else as many
// as fit.
function drawQueue(ctx, scene, name, ids, y, width, regions) {
  const { history, theme } = scene;
  const color = ids.length ? theme.ink : theme.muted;
  writeText(ctx, `${name} ${ids.length || ""}`, 4, y, { color, width: MARGIN.left - 8 });
  const room = width - MARGIN.left - 4;
  const chipOf = (id) => Math.min(110, ctx.measureText(labelOf(history, id)).width + 16);
  const named = ids.length * 34 <= room ? ids.map(chipOf) : [];
  const fits = named.length && named.reduce((sum, wide) => sum + wide + 4, 0) <= room;
  const pitch = ids.length * 15 <= room ? 15 : 7;
  const most = fits ? ids.length : Math.floor((room - (ids.length * pitch > room ? 40 : 0)) / pitch);
  let x = MARGIN.left;
  ids.slice(0, most).forEach((id, i) => {
    const wide = fits ? named[i] : pitch - (pitch > 8 ? 3 : 1);
    drawChip(ctx, scene, id, x, y, wide, fits, name);
    regions.push({ x, y: y - CHIP / 2, width: wide, height: CHIP, kind: "request", id });
    x += wide + (fits ? 4 : pitch > 8 ? 3 : 1);
  });
  if (ids.length > most) writeText(ctx, `+${ids.length - most}`, x + 4, y, { color: theme.ink });
  if (!ids.length) writeText(ctx, "none", MARGIN.left, y, { color: theme.muted });
}

function labelOf(history, id) {
  return history.requests.get(id)?.label ?? id;
}

function drawChip(ctx, { history, theme, hover, selection }, id, x, y, width, named, queue) {
  const { number } = history.requests.get(id);
  const running = queue === "running";
  ctx.beginPath();
  ctx.roundRect(x + 0.5, y - CHIP / 2 + 0.5, width - 1, CHIP - 1, width > 12 ? 5 : 2);
  ctx.fillStyle = running ? theme.fill(number) : theme.background;
  ctx.fill();
  const marked = [hover, selection].some((each) => each?.kind === "request" && each.id === id);
  ctx.strokeStyle = marked ? theme.ink : theme.rim(number);
  ctx.lineWidth = marked ? 2.5 : queue === "swapped" ? 2.5 : 1.3;
  ctx.setLineDash(queue === "waiting" ? [2, 2] : queue === "swapped" ? [5, 3] : []);
  ctx.stroke();
  ctx.setLineDash([]);
  if (!named) return;
  const color = running ? theme.inkOn(theme.fill(number)) : theme.ink;
  writeText(ctx, labelOf(history, id), x + width / 2, y, { color, align: "center", width: width - 8 });
}
