// Requests by steps: when each waited, was prefilled, decoded, was preempted, ended. Long traces are shown a
// window at a time.
import {
  DRAFT_MARKS, FONT, MARGIN, clamp, drawEvent, drawState, drawTokens, isSame, makeView, outlineBox, writeText,
} from "./views_style.js";

const NARROWEST = 4; // pixels a step; with more steps than fit, a window is shown
const WIDEST = 28;
const MOST_ROWS = 64;
const LOWEST_ROW = 7;
const HIGHEST_ROW = 26;
const TOP = 12; // room for the triangles of the first row
const AXIS = 22;

// The steps on the x axis: records `from` (included) to `to` (excluded), `cell` pixels each, and x(index)
// where one begins. All views with steps on their x axis share it, so that they stand in line.
export function stepWindow(history, width, index, follow = false) {
  const plot = Math.max(40, width - MARGIN.left - MARGIN.right);
  const total = history.length - history.first;
  const fit = Math.floor(plot / NARROWEST);
  let [from, to] = [history.first, history.length];
  let cell = clamp(plot / Math.max(1, total), NARROWEST, WIDEST);
  if (total > fit) {
    cell = plot / fit;
    const ahead = index + Math.ceil(fit * 0.3);
    to = follow ? history.length : clamp(ahead, history.first + fit, history.length);
    from = to - fit;
  }
  const x = (at) => MARGIN.left + (at - from) * cell;
  return { from, to, cell, right: x(to), x };
}

// Ticks with step numbers under the plot, the column of the current step over it, and a region a step.
export function drawAxis(ctx, theme, scene, window, top, bottom, regions) {
  const { history, index, hover } = scene;
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * window.cell >= 46) ?? 1000;
  const height = bottom + AXIS - top;
  ctx.fillStyle = theme.faint;
  ctx.fillRect(MARGIN.left, bottom, window.right - MARGIN.left, 1);
  for (let at = window.from; at < window.to; at++) {
    const x = window.x(at);
    regions.push({ x, y: top, width: window.cell, height, kind: "step", index: at });
    const { step, size } = history.record(at);
    if (step % every || !size || Math.abs(x - window.x(index)) < 46) continue;
    ctx.fillStyle = theme.muted;
    ctx.fillRect(x, bottom, 1, 4);
    const look = { color: theme.muted, size: 11, align: "center" };
    writeText(ctx, String(step), x + window.cell / 2, bottom + 12, look);
  }
  if (isSame(hover, "step", hover?.index) && hover.index >= window.from && hover.index < window.to) {
    ctx.strokeStyle = theme.muted;
    ctx.lineWidth = 1;
    ctx.strokeRect(window.x(hover.index) - 0.5, top + 0.5, window.cell + 1, bottom - top - 1);
  }
  if (index < window.from || index >= window.to) return;
  const [x, label] = [window.x(index), `step ${history.record(index).step}`];
  ctx.strokeStyle = theme.ink;
  ctx.lineWidth = 1.5;
  ctx.strokeRect(x - 0.75, top, window.cell + 1.5, bottom - top + 3);
  ctx.font = `600 11px ${FONT}`;
  const half = ctx.measureText(label).width / 2;
  const middle = clamp(x + window.cell / 2, MARGIN.left, window.right + MARGIN.right - half);
  writeText(ctx, label, middle, bottom + 12, { color: theme.ink, size: 11, bold: true, align: "center" });
}

// What comes after the current step is paler.
export function veilFuture(ctx, theme, scene, window, top, bottom) {
  const x = Math.max(MARGIN.left, window.x(scene.index + 1));
  if (x >= window.right) return;
  ctx.globalAlpha = 0.6;
  ctx.fillStyle = theme.background;
  ctx.fillRect(x + 1, top, window.right - x + MARGIN.right, bottom - top);
  ctx.globalAlpha = 1;
}

// Requests that live in the window; with too many, the one that is selected, those that live at the
// current step and the newest of the others.
function rowsOf(history, window, index, most, selection = null) {
  const born = (info) => info.arrived ?? info.firstSeen;
  const infos = [];
  for (const info of history.requests.values()) {
    if (born(info) < window.to && !(info.ended < window.from)) infos.push(info);
  }
  infos.sort((one, other) => one.number - other.number);
  if (infos.length <= most) return { infos, hidden: 0 };
  const now = new Set(infos.filter((info) => isSame(selection, "request", info.id)));
  for (const info of infos) {
    if (now.size < most && born(info) <= index && !(info.ended < index)) now.add(info);
  }
  for (let i = infos.length - 1; i >= 0 && now.size < most; i--) now.add(infos[i]);
  return { infos: infos.filter((info) => now.has(info)), hidden: infos.length - now.size };
}

const ALL_MARKS = ["prefill", "decode", ...DRAFT_MARKS, "cached", "stalled", "waiting", "swapped"];
ALL_MARKS.push("first token", "preempted", "finished", "aborted");
const RARE_MARKS = new Set(["cached", "swapped", "preempted", "aborted"]);

export const TIMELINE_VIEW = makeView({
  title: "Timeline",
  nothing: "What each request computes in which step",
  marks: ALL_MARKS,
  legend: ({ seen }) => ALL_MARKS.filter((mark) => !RARE_MARKS.has(mark) || seen.has(mark)),
  height(history, width, index) {
    const { infos } = rowsOf(history, stepWindow(history, width, index), index, MOST_ROWS);
    const pitch = clamp(520 / Math.max(1, infos.length), LOWEST_ROW, HIGHEST_ROW);
    return TOP + Math.max(2, infos.length) * pitch + AXIS;
  },
  draw(ctx, { width, height }, scene) {
    const { history, index, theme, follow } = scene;
    const room = height - TOP - AXIS;
    const window = stepWindow(history, width, index, follow);
    const most = Math.min(MOST_ROWS, Math.floor(room / LOWEST_ROW));
    const { infos, hidden } = rowsOf(history, window, index, most, scene.selection);
    const pitch = clamp(room / Math.max(1, infos.length), LOWEST_ROW, HIGHEST_ROW);
    const bottom = TOP + infos.length * pitch;
    const rows = new Map(infos.map((info, row) => [info.id, { info, row, y: TOP + (row + 0.5) * pitch }]));
    const regions = [];
    drawLabels(ctx, scene, rows, pitch, width, regions);
    const runs = collectRuns(history, window, rows);
    drawRuns(ctx, theme, runs, window, pitch);
    for (const { info, y } of rows.values()) drawEvents(ctx, theme, info, window, y, pitch);
    veilFuture(ctx, theme, scene, window, 0, bottom);
    const columns = [];
    drawAxis(ctx, theme, scene, window, 2, bottom, columns);
    if (hidden) writeText(ctx, `+ ${hidden} more`, 4, bottom + 12, { color: theme.muted, size: 11 });
    for (const { row, from, to } of runs) {
      const [x, y, wide] = [window.x(from), row.y - pitch / 2, (to - from) * window.cell];
      regions.push({ x, y, width: wide, height: pitch, kind: "request", id: row.info.id });
    }
    return [...columns, ...regions];
  },
});

function drawLabels(ctx, scene, rows, pitch, width, regions) {
  const { theme, hover, selection } = scene;
  const every = Math.max(1, Math.ceil(13 / pitch));
  for (const { info, row, y } of rows.values()) {
    const marked = isSame(selection, "request", info.id) || isSame(hover, "request", info.id);
    if (marked) {
      ctx.globalAlpha = 0.5;
      ctx.fillStyle = theme.faint;
      ctx.fillRect(0, y - pitch / 2, width, pitch);
      ctx.globalAlpha = 1;
    }
    regions.push({ x: 0, y: y - pitch / 2, width: MARGIN.left, height: pitch, kind: "request", id: info.id });
    const swatch = Math.min(10, pitch - 2);
    ctx.fillStyle = theme.fill(info.number);
    ctx.fillRect(4, y - swatch / 2, 10, swatch);
    if (row % every) continue;
    const look = { color: theme.ink, size: pitch >= 15 ? 12 : 11, bold: marked, width: MARGIN.left - 26 };
    writeText(ctx, info.label, 20, y, look);
  }
}

// What each request did in the window, equal kinds of neighbouring records joined: {kind, row, from, to,
// tokens, cached, parts}; with drafts, the kind is "drafts".
function collectRuns(history, window, rows) {
  const open = new Map();
  const runs = [];
  const rowsIn = new Map(); // a queue, which many records share -> its requests that have a row
  const add = (row, kind, at, tokens = 0, cached = 0, parts = null) => {
    const run = open.get(row);
    if (run?.kind === kind && run.to === at && kind !== "prefill" && !parts) run.to = at + 1;
    else {
      const begun = { kind, row, from: at, to: at + 1, tokens, cached, parts };
      open.set(row, begun);
      runs.push(begun);
    }
  };
  const inQueue = (queue) => {
    if (!rowsIn.has(queue)) rowsIn.set(queue, queue.map((id) => rows.get(id)).filter(Boolean));
    return rowsIn.get(queue);
  };
  const busy = new Map(); // row -> the record in which it last had a share
  for (let at = window.from; at < window.to; at++) {
    const record = history.record(at);
    for (let i = 0; i < record.size; i++) {
      const row = rows.get(record.ids[i]);
      if (!row) continue;
      busy.set(row, at);
      if (record.drafts.has(i)) add(row, "drafts", at, record.counts[i], 0, record.parts(i));
      else add(row, record.decodes[i] ? "decode" : "prefill", at, record.counts[i], record.admitted.get(record.ids[i]));
    }
    if (!record.size) continue;
    for (const row of inQueue(record.waiting)) if (busy.get(row) !== at) add(row, "waiting", at);
    for (const row of inQueue(record.swapped)) if (busy.get(row) !== at) add(row, "swapped", at);
    for (const row of inQueue(record.running)) if (busy.get(row) !== at) add(row, "stalled", at);
  }
  return runs;
}

function drawRuns(ctx, theme, runs, window, pitch) {
  const most = Math.max(0, ...runs.map((run) => (run.kind === "prefill" ? run.tokens : 0)));
  const numbered = pitch >= 18 && window.cell > String(most).length * 6.6 + 4; // all of them, or none
  const height = Math.max(3, Math.round(pitch * 0.72));
  for (const run of runs) {
    const { kind, from, to, row } = run;
    const { number } = row.info;
    const x = window.x(from);
    if (kind === "prefill") drawPrefill(ctx, theme, run, x, window.cell, height, numbered);
    else if (kind === "drafts") drawDrafts(ctx, theme, run, x, window.cell, height);
    else if (kind === "decode") drawDecodes(ctx, theme, number, x, row.y, to - from, window.cell, height);
    else drawState(ctx, theme, kind, x, window.x(to), row.y, number);
  }
}

// The part of an admission that came from the prefix cache stands on top of what was computed.
function drawPrefill(ctx, theme, { row, tokens, cached }, x, cell, height, numbered) {
  const { number } = row.info;
  let [top, rest] = [row.y - height / 2, height];
  if (cached) {
    const part = clamp(cached / (cached + tokens), 0.4, 0.7) * height;
    drawTokens(ctx, theme, "cached", x, top, cell, part, number);
    [top, rest] = [top + part, height - part];
  }
  // A gap behind it, else the chunks of a prompt would look like one.
  outlineBox(ctx, x, top, cell - (cell > 6 ? 1 : 0.5), rest, theme.fill(number), theme.rim(number));
  if (cached || !numbered) return;
  const color = theme.inkOn(theme.fill(number));
  writeText(ctx, String(tokens), x + cell / 2, row.y, { color, size: 11, align: "center" });
}

// A box a step where there is room, else one box.
function drawDecodes(ctx, theme, number, x, y, count, cell, height) {
  const top = y - height / 2;
  outlineBox(ctx, x, top, count * cell, height, theme.pale(number), theme.rim(number));
  if (cell < 7) return;
  ctx.fillStyle = theme.rim(number);
  for (let i = 1; i < count; i++) ctx.fillRect(x + i * cell - 0.5, top, 1, height);
}

// A step's tokens by what became of them, from the bottom up.
function drawDrafts(ctx, theme, { row, tokens, parts }, x, cell, height) {
  const { number } = row.info;
  let bottom = row.y + height / 2;
  for (const [kind, count] of parts) {
    const high = (count * height) / tokens;
    drawTokens(ctx, theme, kind, x, bottom - high, cell - (cell > 6 ? 1 : 0), high, number);
    bottom -= high;
  }
}

function drawEvents(ctx, theme, info, window, y, pitch) {
  const size = clamp(pitch * 0.5, 6, 10);
  const mark = (kind, at, shift, up = 0) => {
    if (!(at >= window.from && at < window.to)) return;
    drawEvent(ctx, theme, kind, window.x(at) + shift * window.cell, y - up, size);
  };
  for (const at of info.preemptions) mark("preempted", at, 0);
  mark("first token", info.firstToken, 1, pitch * 0.36);
  if (info.reason) mark(info.aborted ? "aborted" : "finished", info.ended, info.betweenSteps ? 0 : 1);
}
