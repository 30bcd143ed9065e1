// Views of memory: the block tables of requests, and the pool that they point into.
import {
  clamp, drawFresh, drawState, drawTransferring, inDigits, isSame, makeView, outlineBox, writeText,
} from "./views_style.js";

const MOST_MAPPED_BLOCKS = 24; // in a larger pool, arrows would hide each other
const MOST_MAPPED_ENTRIES = 32;
const MOST_FIXED_ROWS = 12; // with no more requests than this, each keeps its row
const HIGHEST_TABLES = 460;
const NO_TABLE_HELD = "no request holds a block";

// Cells in a row of a square block: a divisor of the block size near its square root.
function cellColumns(blockSize) {
  let columns = Math.ceil(Math.sqrt(blockSize));
  while (blockSize % columns) columns += 1;
  return columns;
}

// The first `filled` of the block's cells in the colours of its owners (numbers of requests), a stripe each; the `fading`
// cells behind them are slots of rejected drafts.
function drawBlock(ctx, theme, { x, y, width, height }, filled, blockSize, owners, fading = 0) {
  const square = width === height;
  const across = square ? cellColumns(blockSize) : blockSize;
  const cellWidth = width / across;
  const cellHeight = height / (blockSize / across);
  const edge = owners.length ? theme.rim(owners[0]) : theme.muted;
  ctx.fillStyle = theme.background;
  ctx.fillRect(x, y, width, height);
  const stripe = width / Math.max(1, Math.min(4, owners.length));
  const fill = (cells, colorOf) => {
    const boxes = [[y, width, Math.floor(cells / across) * cellHeight]];
    if (cells % across) boxes.push([y + boxes[0][2], (cells % across) * cellWidth, cellHeight]);
    for (const [top, boxWidth, boxHeight] of boxes) {
      owners.slice(0, 4).forEach((owner, i) => {
        const right = Math.min(boxWidth, (i + 1) * stripe);
        ctx.fillStyle = colorOf(owner);
        if (right > i * stripe) ctx.fillRect(x + i * stripe, top, right - i * stripe, boxHeight);
      });
    }
  };
  if (fading) fill(filled + fading, (owner) => theme.ofTokens("rejected draft", owner));
  fill(filled, (owner) => theme.fill(owner));
  if (cellWidth >= 4 && cellHeight >= 4) {
    ctx.fillStyle = theme.background;
    for (let i = 1; i < across; i++) ctx.fillRect(x + i * cellWidth - 0.35, y, 0.7, height);
    for (let i = 1; i < blockSize / across; i++) ctx.fillRect(x, y + i * cellHeight - 0.35, width, 0.7);
  }
  if (width >= 8) {
    ctx.strokeStyle = edge;
    ctx.lineWidth = 1;
    ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }
}

// The height at which a block's id is written: in the middle, but not over slots that fade.
function idHeight(box, filled, blockSize, fading) {
  return box.y + box.height * (fading ? (filled > blockSize / 2 ? 0.2 : 0.8) : 0.5);
}

// A text on a patch of background, so that it can be read on any block.
function drawBadge(ctx, theme, text, x, y, { size = 11, bold = false } = {}) {
  ctx.font = `${bold ? "600 " : ""}${size}px sans-serif`;
  const width = ctx.measureText(text).width + 4;
  ctx.globalAlpha = 0.88;
  ctx.fillStyle = theme.background;
  ctx.fillRect(x - width / 2, y - size / 2 - 1, width, size + 2);
  ctx.globalAlpha = 1;
  writeText(ctx, text, x, y + 0.5, { color: theme.ink, size, bold, align: "center" });
}

function drawPhysical(ctx, scene, state, block, box, gap) {
  const { theme, history } = scene;
  const holders = state.holders(block);
  if (holders.length) {
    const owners = holders.map((id) => history.requests.get(id).number);
    drawBlock(ctx, theme, box, state.filled(block), state.blockSize, owners, state.fading(block));
    const what = freshness(state, block);
    const color = theme.rim(owners.at(-1)); // of the request that found or allocated it
    if (what && gap >= 4) drawFreshBox(ctx, theme, what, box, color);
    else if (what) drawFresh(ctx, theme, what, box.x, box.y, Math.min(box.width, 7), color);
  } else if (state.isTransferring(block)) {
    drawTransferring(ctx, theme, box.x, box.y, box.width, box.height);
  } else if (state.isCached(block)) {
    const hatch = theme.hatch(ctx, theme.muted);
    outlineBox(ctx, box.x, box.y, box.width, box.height, hatch, box.width < 8 ? hatch : theme.muted);
  } else {
    outlineBox(ctx, box.x, box.y, box.width, box.height, theme.background, theme.faint);
  }
}

function freshness(state, block) {
  if (state.hits.has(block)) return "hit";
  if (state.evicted.has(block)) return "evicted";
  return state.allocated.has(block) ? "allocated" : null;
}

function drawFreshBox(ctx, theme, what, box, color) {
  if (box.width === box.height) {
    drawFresh(ctx, theme, what, box.x, box.y, box.width, color);
    return;
  }
  ctx.strokeStyle = what === "hit" ? color : theme.ink;
  ctx.globalAlpha = what === "hit" ? 0.4 : 1;
  ctx.lineWidth = what === "hit" ? 4 : 1.5;
  ctx.strokeRect(box.x - 1.75, box.y - 1.75, box.width + 3.5, box.height + 3.5);
  ctx.globalAlpha = 1;
  if (what !== "evicted") return;
  drawFresh(ctx, theme, "evicted", box.x + box.width - box.height, box.y, box.height, color);
}

// Whether the block has to do with what the reader points at; true if that is no request and no block.
function concerns(scene, state, block) {
  const focus = scene.hover ?? scene.selection;
  if (focus?.kind === "request") return state.tables.get(focus.id)?.includes(block) ?? true;
  return focus?.kind === "block" ? focus.id === block : true;
}

function veil(ctx, theme, box, grow = 2) {
  ctx.globalAlpha = 0.66;
  ctx.fillStyle = theme.background;
  ctx.fillRect(box.x - grow, box.y - grow, box.width + 2 * grow, box.height + 2 * grow);
  ctx.globalAlpha = 1;
}

// ---------------------------------------------------------------- the pool

const POOL_HEIGHT = 340;
const POOL_WORDS = 46; // pixels below the squares, for two lines of text
const EASY_PITCH = 12; // pixels a block, from which on its colour and its filling can be read
const PITCHES = [44, 40, 36, 32, 28, 24, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4];
const FEW_PITCHES = [44, 28, 20, 14, 12, 8, 6, 5, 4]; // fewer, since squares shrink while a live pool fills

// The squares of the pool: all blocks if they are easy to read, else only rows with a block that was ever in use.
function poolLayout(history, width) {
  const numBlocks = numBlocksOf(history);
  const digits = String(numBlocks - 1).length;
  const usual = Math.max(8, Math.min(32, Math.ceil(Math.sqrt(numBlocks * 2.5))));
  const made = (pitch, columns, rows, label) => {
    const gap = pitch >= 20 ? 6 : pitch >= 12 ? 4 : pitch >= 8 ? 2 : 1;
    return { pitch, columns, rows, label, gap, side: pitch - gap, ids: pitch - gap >= 8 + digits * 6.5 };
  };
  const columnsOf = (pitch, room) => {
    const fit = Math.max(1, Math.floor(room / pitch));
    return Math.min(numBlocks, fit >= 16 ? fit - (fit % 4) : fit);
  };
  for (const pitch of PITCHES.filter((each) => each >= EASY_PITCH)) {
    const columns = numBlocks <= 256 ? Math.min(usual, columnsOf(pitch, width - 8)) : columnsOf(pitch, width - 8);
    const rows = Math.ceil(numBlocks / columns);
    if (rows * pitch <= POOL_HEIGHT) return made(pitch, columns, rows, 0);
  }
  const label = digits * 7 + 6; // each row is labelled with its first block
  let layout = null;
  for (const pitch of FEW_PITCHES) {
    const columns = columnsOf(pitch, width - 8 - label);
    const used = new Set(Array.from(history.usedBlocks, (block) => Math.floor(block / columns))).size || 1;
    const most = Math.floor(POOL_HEIGHT / pitch);
    layout = made(pitch, columns, Math.min(used, most), label);
    // Squares are made smaller than what is easy to read only where blocks that are held would not fit.
    if (used <= most || (pitch <= EASY_PITCH && history.peakEntries <= most * columns)) break;
  }
  return layout;
}

// The rows that are drawn, in order. Where not all fit, those with held blocks go first, then those with cached content.
// Squares shrink while a live pool fills, but the picture keeps its height for a while: the room that becomes free shows
// rows that were never in use.
function poolRows(history, state, { columns, rows, pitch, label }, height) {
  if (!label) return Array.from({ length: rows }, (_, row) => row);
  const all = Math.ceil(state.numBlocks / columns);
  const lines = Math.min(all, Math.max(rows, Math.floor((height - POOL_WORDS) / pitch)));
  const found = [new Set(), new Set(), new Set()];
  for (const block of history.usedBlocks) {
    const kind = state.refCount(block) ? 0 : state.isCached(block) ? 1 : 2;
    found[kind].add(Math.floor(block / columns));
  }
  const used = new Set([...found[0], ...found[1], ...found[2], 0]);
  const shown = new Set([...used].slice(0, lines));
  for (let row = 0; shown.size < lines; row++) shown.add(row);
  return [...shown].sort((one, other) => one - other);
}

const CACHE_MARKS = ["cached block", "prefix hit", "overwritten"];
const OF_FREE_BLOCKS = new Set(["free", "cached block", "in transfer"]); // which no request holds

// The marks of blocks of the pool.
function poolMarks({ settings, seen }) {
  const cache = settings.enable_prefix_caching === false ? [] : CACHE_MARKS;
  return ["free", "new block", ...cache, ...(seen.has("held") ? ["in transfer"] : []), "rejected draft"];
}

export const POOL_VIEW = makeView({
  title: "The pool of blocks",
  nothing: "All blocks of the pool, and the requests that hold them",
  marks: ["free", "new block", ...CACHE_MARKS, "in transfer", "rejected draft"],
  legend: poolMarks,
  height(history, width) {
    const { pitch, rows } = poolLayout(history, width);
    return rows * pitch + POOL_WORDS;
  },
  draw(ctx, { width, height }, scene) {
    const { history, index, theme } = scene;
    const state = history.stateAt(index);
    const layout = poolLayout(history, width);
    const { pitch, columns, gap, side, ids, label } = layout;
    const regions = [];
    const rows = poolRows(history, state, layout, height);
    rows.forEach((row, line) => {
      const [first, y] = [row * columns, 4 + line * pitch];
      const look = { color: theme.muted, size: 11, align: "right" };
      if (label && (pitch > EASY_PITCH || line % 2 === 0)) writeText(ctx, String(first), label, y + side / 2 + 0.5, look);
      for (let block = first; block < Math.min(first + columns, state.numBlocks); block++) {
        const box = { x: 4 + label + (block - first) * pitch, y, width: side, height: side };
        drawPhysical(ctx, scene, state, block, box, gap);
        if (ids) drawPoolText(ctx, theme, state, block, box);
        if (!concerns(scene, state, block)) veil(ctx, theme, box, gap / 2);
        regions.push({ ...box, kind: "block", id: block });
      }
    });
    const words = describePool(state, regions.map(({ id }) => id));
    const top = rows.length * pitch + 16;
    words.forEach((line, i) => writeText(ctx, line, 4, top + 16 * i, { color: theme.ink, width: width - 8 }));
    return regions;
  },
});

// The blocks by what they are, in two lines, and how many of them are not among those `drawn`.
function describePool(state, drawn) {
  const kindOf = (block) => (state.refCount(block) ? "held" : state.isCached(block) ? "cached" : "empty");
  const all = { held: 0, cached: 0, empty: 0 };
  for (let block = 0; block < state.numBlocks; block++) all[kindOf(block)] += 1;
  const hidden = { ...all };
  for (const block of drawn) hidden[kindOf(block)] -= 1;
  const parts = Object.entries(hidden).filter(([, number]) => number).map(([kind, number]) => `${inDigits(number)} ${kind}`);
  return [
    `Held: ${inDigits(all.held)} of ${inDigits(state.numBlocks)} blocks. Free, still cached: ${inDigits(all.cached)}.`,
    `Free, empty: ${inDigits(all.empty)}.${parts.length ? ` Not drawn: ${parts.join(", ")}.` : ""}`,
  ];
}

function drawPoolText(ctx, theme, state, block, box) {
  const y = idHeight(box, state.filled(block), state.blockSize, state.fading(block));
  const x = box.x + box.width / 2;
  const shared = state.refCount(block) > 1;
  const both = shared && box.height >= 30;
  if (both) drawBadge(ctx, theme, `×${state.refCount(block)}`, x, y + 8, { bold: true });
  const used = state.refCount(block) || state.isCached(block);
  if (used) drawBadge(ctx, theme, String(block), x, both ? y - 7 : y);
  else writeText(ctx, String(block), x, y + 0.5, { color: theme.muted, size: 11, align: "center" });
}

function numBlocksOf(history) {
  return history.record(history.length - 1).numBlocks;
}

// ---------------------------------------------------------------- block tables

function isMapped(history) {
  return numBlocksOf(history) <= MOST_MAPPED_BLOCKS && history.peakEntries <= MOST_MAPPED_ENTRIES;
}

export const TABLES_VIEW = makeView({
  title: "Block tables",
  nothing: "The block table of each request",
  marks: ["free", "new block", ...CACHE_MARKS, "in transfer", "rejected draft"],
  // With arrows into the pool, its free blocks are drawn, too.
  legend: (history) => (isMapped(history) ? poolMarks(history) : poolMarks(history).filter((mark) => !OF_FREE_BLOCKS.has(mark))),
  follows: (history) => !isMapped(history),
  height(history, width, index) {
    return isMapped(history) ? mappedHeight(history) : rowsLayout(history, width, history.stateAt(index)).height;
  },
  draw(ctx, size, scene) {
    const state = scene.history.stateAt(scene.index);
    return isMapped(scene.history) ? drawMapped(ctx, size, scene, state) : drawRows(ctx, size, scene, state);
  },
});

function filledOf(state, id, position) {
  const written = state.numTokens.get(id) ?? Infinity;
  return clamp(written - position * state.blockSize, 0, state.blockSize);
}

function mappedHeight(history) {
  const entries = history.peakEntries + 0.5 * Math.max(0, history.peakHolders - 1);
  return 34 + Math.max(numBlocksOf(history), entries) * 20;
}

// Two lists of blocks drawn as strips, logical and physical, and an arrow for each table entry.
function drawMapped(ctx, size, scene, state) {
  const { history, theme } = scene;
  const label = size.width < 480 ? 58 : 92;
  const words = scene.settings?.words; // the tokens of some requests as texts, which are written into the cells
  const strip = clamp((size.width - label - 50) * (words ? 0.4 : 0.32), 60, 200);
  const margin = words ? 34 : 6; // reference counts are not written over words
  const right = Math.min(size.width - strip - margin, label + 24 + strip + 300);
  const left = label + 20;
  const regions = [];
  const arrows = [];
  const heading = { color: theme.ink, align: "center", width: strip + 12 };
  const pool = size.width < 620 ? "the pool" : "physical blocks (the pool)";
  writeText(ctx, "logical blocks", left + strip / 2, 12, heading);
  writeText(ctx, pool, right + strip / 2, 12, heading);
  for (let block = 0; block < state.numBlocks; block++) {
    const box = { x: right, y: 28 + block * 20, width: strip, height: 15 };
    drawPhysical(ctx, scene, state, block, box, 4);
    const [holder] = state.holders(block);
    if (words && holder) writeWords(ctx, scene, state, holder, state.tables.get(holder).indexOf(block), box, true);
    if (!concerns(scene, state, block)) veil(ctx, theme, box);
    writeText(ctx, String(block), right - 6, box.y + 8, { color: theme.ink, size: 11, align: "right" });
    const count = state.refCount(block);
    const badge = right + strip + (words ? 16 : -14);
    if (count > 1) drawBadge(ctx, theme, `×${count}`, badge, box.y + 7.5, { bold: true });
    regions.push({ ...box, x: right - 24, width: strip + 24, kind: "block", id: block });
  }
  let y = 28;
  for (const [id, table] of orderedTables(history, state)) {
    const { number, label: name } = history.requests.get(id);
    const middle = y + (table.length * 20 - 5) / 2;
    const look = { color: theme.ink, bold: true, align: "right", width: label - 6 };
    writeText(ctx, name, label - 2, middle, look);
    regions.push({ x: 0, y, width: left + strip, height: table.length * 20, kind: "request", id });
    table.forEach((block, i) => {
      const box = { x: left, y, width: strip, height: 15 };
      drawBlock(ctx, theme, box, filledOf(state, id, i), state.blockSize, [number], state.fadingOf(id, i));
      if (words) writeWords(ctx, scene, state, id, i, box);
      writeText(ctx, String(i), left - 5, y + 8, { color: theme.muted, size: 11, align: "right" });
      if (!concerns(scene, state, block)) veil(ctx, theme, box);
      regions.push({ ...box, kind: "block", id: block });
      arrows.push({ block, from: y + 7.5, to: 28 + block * 20 + 7.5, color: theme.rim(number) });
      y += 20;
    });
    y += 10;
  }
  for (const arrow of arrows) {
    ctx.globalAlpha = concerns(scene, state, arrow.block) ? 1 : 0.25;
    drawArrow(ctx, theme, left + strip + 3, arrow.from, right - 24, arrow.to, arrow.color);
  }
  ctx.globalAlpha = 1;
  if (!arrows.length) writeText(ctx, NO_TABLE_HELD, left, 36, { color: theme.muted, width: strip + 60 });
  return regions;
}

// The texts of a block's tokens, each in its cell; on a badge where a physical block has the stripes of several holders.
function writeWords(ctx, { history, theme, settings }, state, id, position, { x, y, width, height }, physical = false) {
  const first = position * state.blockSize;
  const cell = width / state.blockSize;
  const color = theme.inkOn(theme.fill(history.requests.get(id).number));
  const shared = physical && state.refCount(state.tables.get(id)[position]) > 1;
  const texts = settings.words[id]?.slice(first, first + filledOf(state, id, position)) ?? [];
  texts.forEach((text, i) => {
    const [middle, line] = [x + (i + 0.5) * cell, y + height / 2];
    if (shared) drawBadge(ctx, theme, text, middle, line);
    else writeText(ctx, text, middle, line + 0.5, { color, size: 11, align: "center", width: cell - 1 });
  });
}

function orderedTables(history, state) {
  const numberOf = (id) => history.requests.get(id).number;
  return [...state.tables].sort(([one], [other]) => numberOf(one) - numberOf(other));
}

// A rim in the background's colour keeps crossing arrows apart.
function drawArrow(ctx, theme, x0, y0, x1, y1, color) {
  const bend = (x1 - x0) * 0.45;
  for (const [style, width] of [[theme.background, 4], [color, 1.7]]) {
    ctx.strokeStyle = ctx.fillStyle = style;
    ctx.lineWidth = width;
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.bezierCurveTo(x0 + bend, y0, x1 - bend - 6, y1, x1 - 6, y1);
    ctx.stroke();
  }
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x1 - 8, y1 - 4);
  ctx.lineTo(x1 - 8, y1 + 4);
  ctx.fill();
}

// Squares in rows, one request per row; the larger the squares, the better, as long as all fit. Their size follows the
// most that there ever was to draw. So does the height, but not on a live page, which gives up room that is not needed.
function rowsLayout(history, width, state) {
  const digits = String(numBlocksOf(history) - 1).length;
  const [side, label] = [Math.max(24, digits * 7 + 10), width < 480 ? 64 : 92];
  const options = [{ side, gap: 6, label, narrowest: 380, ids: true }]; // with room for the ids of blocks
  for (const [less, gap] of [[14, 4], [10, 3], [7, 2], [5, 1]]) {
    options.push({ side: less, gap, label: 76, narrowest: 250, ids: false });
  }
  const fixed = history.requests.size <= MOST_FIXED_ROWS;
  const peaks = Array.from(history.requests.values(), (info) => info.peakBlocks);
  const lengths = fixed ? peaks : history.peakLengths;
  const now = Array.from(state.tables.values(), (table) => table.length);
  const heightOf = ({ columns, perLine, pitch }, each, others) => {
    const lines = each.reduce((sum, length) => sum + Math.max(1, Math.ceil(length / perLine)), others);
    const high = Math.ceil(lines / columns) + (columns > 1 ? 1 : 0); // no request is torn between columns
    return 12 + Math.max(1, high) * pitch;
  };
  let best = null;
  for (const option of options) {
    for (let columns = 1; columns <= Math.max(1, Math.floor(width / option.narrowest)); columns++) {
      const square = option.side + option.gap;
      const perLine = Math.max(1, Math.floor((width / columns - option.label - 12) / square));
      best = { ...option, columns, perLine, pitch: Math.max(square, 15), fixed };
      best.height = heightOf(best, lengths, fixed ? 0 : Math.max(0, history.peakHolders - lengths.length));
      if (best.height > HIGHEST_TABLES) continue;
      if (history.settings.live && !fixed) best.height = heightOf(best, now, 0);
      return best;
    }
  }
  return { ...best, height: HIGHEST_TABLES };
}

function drawRows(ctx, { width, height }, scene, state) {
  const { history, theme } = scene;
  const layout = rowsLayout(history, width, state);
  const infos = rowsInOrder(scene, state, layout, height);
  const regions = [];
  const top = 6;
  let [column, y, drawn] = [0, top, 0];
  for (const info of infos) {
    const count = layout.fixed ? info.peakBlocks : state.tables.get(info.id).length;
    const lines = Math.max(1, Math.ceil(count / layout.perLine));
    if (y + lines * layout.pitch > height + layout.gap && y > top) [column, y] = [column + 1, top];
    if (column >= layout.columns) break;
    const place = { x: (column * width) / layout.columns, y, lines };
    drawTableRow(ctx, scene, state, info, layout, place, regions);
    y += lines * layout.pitch;
    drawn += 1;
  }
  if (!infos.length) writeText(ctx, NO_TABLE_HELD, 4, 18, { color: theme.muted });
  const more = infos.length - drawn;
  if (more) drawBadge(ctx, theme, `+ ${more} more requests`, width - 70, height - 8);
  return regions;
}

// Requests from top to bottom. Where they do not all fit, the one that is selected goes first.
function rowsInOrder({ history, selection }, state, layout, height) {
  if (layout.fixed) return [...history.requests.values()];
  const infos = orderedTables(history, state).map(([id]) => history.requests.get(id));
  const lineCount = ({ id }) => Math.max(1, Math.ceil(state.tables.get(id).length / layout.perLine));
  const lines = infos.reduce((sum, info) => sum + lineCount(info), 0);
  const selected = infos.findIndex((info) => isSame(selection, "request", info.id));
  const overflows = lines * layout.pitch > layout.columns * (height - layout.pitch);
  if (overflows && selected > 0) infos.unshift(...infos.splice(selected, 1));
  return infos;
}

function drawTableRow(ctx, scene, state, info, layout, { x, y, lines }, regions) {
  const { theme } = scene;
  const { side, gap, pitch, label } = layout;
  const table = state.tables.get(info.id) ?? [];
  const middle = y + Math.max(side, 7) / 2;
  regions.push({ x, y: y - gap / 2, width: label, height: lines * pitch, kind: "request", id: info.id });
  ctx.fillStyle = theme.fill(info.number);
  ctx.fillRect(x + 4, middle - 5, 10, 10);
  const bold = isSame(scene.hover, "request", info.id) || isSame(scene.selection, "request", info.id);
  const color = table.length ? theme.ink : theme.muted;
  writeText(ctx, info.label, x + 20, middle, { color, bold, width: label - 26 });
  if (!table.length) drawIdle(ctx, scene, info, x + label, middle);
  table.forEach((block, i) => {
    const [across, line] = [i % layout.perLine, Math.floor(i / layout.perLine)];
    const box = { x: x + label + across * (side + gap), y: y + line * pitch, width: side, height: side };
    const [filled, fading] = [filledOf(state, info.id, i), state.fadingOf(info.id, i)];
    drawBlock(ctx, theme, box, filled, state.blockSize, [info.number], fading);
    if (state.refCount(block) > 1 && side >= 10) drawSharers(ctx, scene, state, block, info.id, box);
    const what = freshIn(scene, state, info.id, block);
    if (what) drawFresh(ctx, theme, what, box.x, box.y, side, theme.rim(info.number));
    if (layout.ids) drawBadge(ctx, theme, String(block), box.x + side / 2, idHeight(box, filled, state.blockSize, fading));
    if (!concerns(scene, state, block)) veil(ctx, theme, box, gap / 2);
    regions.push({ ...box, kind: "block", id: block });
  });
}

// What happened to the block in this very table: one request may have found what another one wrote long ago.
function freshIn(scene, state, id, block) {
  const what = freshness(state, block);
  if (what !== "hit") return what;
  const record = scene.history.record(scene.index);
  return record.admitted.has(id) || record.resumed.includes(id) ? what : null;
}

// Others that hold the block too, as a band of their colours along its lower edge.
function drawSharers(ctx, { history, theme }, state, block, id, box) {
  const others = state.holders(block).filter((holder) => holder !== id).slice(0, 4);
  const part = box.width / others.length;
  const band = Math.max(3, Math.round(box.height / 5));
  others.forEach((other, i) => {
    ctx.fillStyle = theme.fill(history.requests.get(other).number);
    ctx.fillRect(box.x + i * part, box.y + box.height - band, part, band);
  });
  ctx.fillStyle = theme.background;
  ctx.fillRect(box.x, box.y + box.height - band - 1, box.width, 1);
}

// A request without blocks: where it is instead.
function drawIdle(ctx, { history, index, theme }, info, x, y) {
  const record = history.record(index);
  if (record.swapped.includes(info.id)) {
    drawState(ctx, theme, "swapped", x, x + 40, y, info.number);
    writeText(ctx, "in host memory", x + 48, y, { color: theme.muted });
  } else if (record.waiting.includes(info.id)) {
    drawState(ctx, theme, "waiting", x, x + 40, y, info.number);
    writeText(ctx, "waiting", x + 48, y, { color: theme.muted });
  } else if (info.ended <= index) {
    writeText(ctx, info.reason ? `ended: ${info.reason}` : "ended", x, y, { color: theme.muted });
  } else {
    writeText(ctx, "not arrived yet", x, y, { color: theme.muted });
  }
}
