// Views of one step's computation: the pages that attention reads and writes, and the packed batch.
import { DRAFT_MARKS, drawParts, drawTokens, makeView, outlineFocus, writeText } from "./views_style.js";

const HIGHEST_LIST = 460;
const LABEL = 92;
const WORDS = 250; // pixels that a line of words needs
const MOST_TOKEN_LINES = 4;
const TOKEN_CELL = 38;
const TOKEN_LINE = 78;

function sayIdle(ctx, theme) {
  writeText(ctx, "Nothing is computed in this step.", 4, 22, { color: theme.muted });
  return [];
}

// ---------------------------------------------------------------- attention

// Sides of a page and of the gap behind it: the largest of which all of the step's pages fit, in a column or
// two. What is read and written stands behind the pages where there is room, else above them.
function pagesLayout(record, tables, width) {
  const lengths = record.ids.map((id) => tables.get(id)?.length ?? 0);
  const longest = Math.max(...lengths);
  let best = null;
  for (const side of [30, 22, 14, 9, 6, 4]) {
    for (let columns = 1; columns <= Math.max(1, Math.floor(width / 420)); columns++) {
      const gap = side > 10 ? 3 : 1;
      const room = width / columns - LABEL - 8;
      const behind = longest * (side + gap) + WORDS <= room;
      const perLine = Math.max(1, Math.floor(room / (side + gap)));
      const words = behind ? 0 : 19;
      const low = side >= 22 ? 27 : 18;
      const lines = lengths.reduce((sum, length) => sum + Math.max(1, Math.ceil(length / perLine)), 0);
      const spare = columns > 1 ? low + words : 0; // a request is not torn between columns
      const height = Math.ceil((record.size * words + lines * low) / columns) + spare;
      const option = { side, gap, perLine, low, words, behind, columns, wide: width / columns, height };
      if (height <= HIGHEST_LIST) return option;
      if (!best || height < best.height) best = option;
    }
  }
  return { ...best, height: HIGHEST_LIST };
}

export const ATTENTION_VIEW = makeView({
  title: "What attention reads",
  nothing: "The pages that each request's attention reads",
  marks: ["read", "written now", "rejected draft"],
  height(history, width, index) {
    return 20 + Math.max(24, pagesLayout(history.record(index), history.stateAt(index).tables, width).height);
  },
  draw(ctx, size, scene) {
    const { history, index, theme } = scene;
    const record = history.record(index);
    if (!record.size) return sayIdle(ctx, theme);
    const state = history.stateAt(index);
    const layout = pagesLayout(record, state.tables, size.width);
    const regions = [];
    const bottom = size.height - 14;
    let [column, y] = [0, 4];
    for (let row = 0; row < record.size; row++) {
      const table = state.tables.get(record.ids[row]) ?? [];
      const high = layout.words + Math.max(1, Math.ceil(table.length / layout.perLine)) * layout.low;
      if (y + high > bottom && y > 4) [column, y] = [column + 1, 4];
      if (column >= layout.columns) {
        writeText(ctx, `+ ${record.size - row} more requests`, 4, bottom + 6, { color: theme.muted });
        break;
      }
      drawReader(ctx, scene, record, row, table, layout, column * layout.wide, y, regions);
      y += high;
    }
    return regions;
  },
});

function drawReader(ctx, scene, record, row, table, layout, x0, y, regions) {
  const { history, theme, settings } = scene;
  const info = history.requests.get(record.ids[row]);
  const [start, count, size] = [record.starts[row], record.counts[row], history.blockSize];
  const middle = layout.behind ? y + (layout.low - 4) / 2 : y + 9;
  const numPages = Math.ceil(start / size);
  const pages = numPages === 1 ? "1 page" : `${numPages} pages`;
  const reads = start ? `reads ${start} in ${pages}` : "reads nothing before";
  const words = `${kindOf(record, row)}: ${reads}, writes ${count}${draftsInWords(record, row)}`;
  const left = layout.behind ? x0 + LABEL + table.length * (layout.side + layout.gap) + 8 : x0 + LABEL;
  writeText(ctx, info.label, x0 + 4, middle, { color: theme.ink, bold: true, width: LABEL - 8 });
  writeText(ctx, words, left, middle, { color: theme.ink, size: 11, width: x0 + layout.wide - left - 4 });
  const height = layout.behind ? layout.low : layout.words;
  regions.push({ x: x0, y, width: layout.wide, height, kind: "request", id: info.id });
  const used = Math.ceil((start + count) / size);
  const perSplit = settings?.splits > 1 ? Math.ceil(used / settings.splits) : 0;
  table.forEach((block, i) => {
    const x = x0 + LABEL + (i % layout.perLine) * (layout.side + layout.gap);
    const top = y + layout.words + Math.floor(i / layout.perLine) * layout.low;
    const page = { x, y: top, width: layout.side, height: layout.low - 4 };
    drawPage(ctx, theme, info.number, page, [i * size, size], start, count, record.numRejected(row));
    if (layout.side >= 22) writePageId(ctx, theme, block, page);
    if (perSplit && i % perSplit === 0 && i > 0 && i < used) {
      ctx.fillStyle = theme.ink;
      ctx.fillRect(x - layout.gap / 2 - 0.75, top - 3, 1.5, page.height + 6);
    }
    outlineFocus(ctx, scene, "block", block, page);
    outlineFocus(ctx, scene, "request", info.id, page);
    regions.push({ ...page, kind: "block", id: block });
  });
}

// A page from position `first` on: what is read is pale, what this step writes is solid, rejected drafts at its end fade, the
// rest is empty.
function drawPage(ctx, theme, number, { x, y, width, height }, [first, size], start, count, rejected) {
  const at = (position) => x + (width * Math.min(size, Math.max(0, position - first))) / size;
  ctx.fillStyle = theme.pale(number);
  ctx.fillRect(x, y, at(start) - x, height);
  const [kept, end] = [at(start + count - rejected), at(start + count)];
  ctx.fillStyle = theme.fill(number);
  ctx.fillRect(at(start), y, kept - at(start), height);
  if (end > kept) drawTokens(ctx, theme, "rejected draft", kept, y, end - kept, height, number);
  ctx.strokeStyle = theme.rim(number);
  ctx.lineWidth = 1;
  if (width >= 9) ctx.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
}

function writePageId(ctx, theme, block, { x, y, width, height }) {
  ctx.font = "11px sans-serif";
  const wide = ctx.measureText(String(block)).width + 3;
  ctx.globalAlpha = 0.85;
  ctx.fillStyle = theme.background;
  ctx.fillRect(x + (width - wide) / 2, y + height / 2 - 6, wide, 12);
  ctx.globalAlpha = 1;
  const look = { color: theme.ink, size: 11, align: "center" };
  writeText(ctx, String(block), x + width / 2, y + height / 2 + 0.5, look);
}

// ---------------------------------------------------------------- the packed batch

// Tokens in a line, and lines, if each token gets a column.
function tokenLines(record, width) {
  const perLine = Math.max(1, Math.floor((width - LABEL - 4) / TOKEN_CELL));
  return { perLine, lines: Math.ceil(record.numTokens / perLine) };
}

function batchHeight(record, width) {
  const { lines } = tokenLines(record, width);
  if (lines <= MOST_TOKEN_LINES) return 8 + Math.max(1, lines) * TOKEN_LINE;
  return Math.min(HIGHEST_LIST, 62 + record.size * 20);
}

export const BATCH_VIEW = makeView({
  title: "The packed batch",
  nothing: "The tokens of a step as the model gets them",
  marks: ["prefill", "decode", ...DRAFT_MARKS],
  height: (history, width, index) => batchHeight(history.record(index), width),
  draw(ctx, { width, height }, scene) {
    const record = scene.history.record(scene.index);
    if (!record.size) return sayIdle(ctx, scene.theme);
    const inCells = tokenLines(record, width).lines <= MOST_TOKEN_LINES;
    if (inCells) return drawTokenCells(ctx, scene, record, width);
    return drawSegments(ctx, scene, record, width, height);
  },
});

// Where the keys and values of a position go: block * block_size + offset.
function slotOf(state, id, position) {
  const block = state.tables.get(id)?.[Math.floor(position / state.blockSize)];
  return block === undefined ? undefined : block * state.blockSize + (position % state.blockSize);
}

// A column a token: whose it is, its position in the request, its slot in the cache.
function drawTokenCells(ctx, scene, record, width) {
  const { history, index, theme } = scene;
  const state = history.stateAt(index);
  const { perLine } = tokenLines(record, width);
  const regions = [];
  const look = { color: theme.ink, size: 11, align: "center", width: TOKEN_CELL - 5 };
  let packed = 0;
  for (let row = 0; row < record.size; row++) {
    const id = record.ids[row];
    const { number, label } = history.requests.get(id);
    const kinds = record.parts(row).flatMap(([kind, count]) => Array(count).fill(kind));
    for (let i = 0; i < record.counts[row]; i++, packed++) {
      const [x, y] = [LABEL + (packed % perLine) * TOKEN_CELL, 6 + Math.floor(packed / perLine) * TOKEN_LINE];
      if (packed % perLine === 0) labelTokenRows(ctx, theme, y);
      drawTokens(ctx, theme, kinds[i], x, y, TOKEN_CELL - 3, 24, number);
      const ink = inkOn(theme, kinds[i], number);
      const middle = x + (TOKEN_CELL - 3) / 2;
      const position = record.starts[row] + i;
      writeText(ctx, label, middle, y + 12.5, { ...look, color: ink });
      const fading = kinds[i] === "rejected draft" ? { color: theme.muted } : {};
      writeText(ctx, String(position), middle, y + 36, { ...look, ...fading });
      writeText(ctx, String(slotOf(state, id, position) ?? "–"), middle, y + 54, { ...look, ...fading });
      outlineFocus(ctx, scene, "request", id, { x, y, width: TOKEN_CELL - 3, height: 24 });
      regions.push({ x, y, width: TOKEN_CELL - 3, height: 64, kind: "request", id });
    }
  }
  return regions;
}

function inkOn(theme, kind, number) {
  if (kind === "rejected draft") return theme.muted;
  return kind === "decode" ? theme.ink : theme.inkOn(theme.ofTokens(kind, number));
}

function labelTokenRows(ctx, theme, y) {
  ["request", "position", "slot"].forEach((name, line) => {
    writeText(ctx, name, 4, y + [12, 36, 54][line], { color: theme.muted, size: 11 });
  });
}

// Too many tokens for columns of their own: one bar with a part for each request, and a line of text for
// each.
function drawSegments(ctx, scene, record, width, bottom) {
  const { history, theme } = scene;
  const scale = (width - 8) / record.numTokens;
  const regions = [];
  const words = `${record.numTokens} tokens of ${record.size} requests, one after the other`;
  writeText(ctx, words, 4, 12, { color: theme.ink, width: width - 8 });
  const most = Math.floor((bottom - 58) / 20); // lines of text
  const listed = record.size <= most ? record.size : most - 1;
  let packed = 0;
  for (let row = 0; row < record.size; row++) {
    const id = record.ids[row];
    const box = { x: 4 + packed * scale, y: 24, width: record.counts[row] * scale, height: 24 };
    const wide = Math.max(0.6, box.width - (box.width > 5 ? 1 : 0));
    const { number } = history.requests.get(id);
    drawParts(ctx, theme, record.parts(row), box.x, box.y, scale, box.height, number, box.width - wide);
    outlineFocus(ctx, scene, "request", id, box);
    regions.push({ ...box, kind: "request", id });
    if (row < listed) {
      describeSegment(ctx, scene, record, row, packed, 66 + row * 20, width);
      regions.push({ x: 0, y: 56 + row * 20, width, height: 20, kind: "request", id });
    }
    packed += record.counts[row];
  }
  if (listed < record.size) {
    const more = `+ ${record.size - listed} more requests`;
    writeText(ctx, more, LABEL, 66 + listed * 20, { color: theme.muted });
  }
  return regions;
}

function describeSegment(ctx, { history, index, theme }, record, row, packed, y, width) {
  const { id, start, numTokens: count } = record.share(row);
  const size = history.blockSize;
  const { number, label } = history.requests.get(id);
  const table = history.stateAt(index).tables.get(id) ?? [];
  const blocks = table.slice(Math.floor(start / size), Math.ceil((start + count) / size));
  const range = (noun, from) => (count === 1 ? `${noun} ${from}` : `${noun}s ${from}–${from + count - 1}`);
  const where = `${blocks.length === 1 ? "block" : "blocks"} ${blocks.join(" ")}`;
  const words = `${range("row", packed)}, ${range("position", start)}, ${where}${draftsInWords(record, row)}`;
  drawTokens(ctx, theme, kindOf(record, row), 4, y - 6, 12, 12, number);
  writeText(ctx, label, 22, y, { color: theme.ink, bold: true, width: LABEL - 26 });
  writeText(ctx, words, LABEL, y, { color: theme.ink, width: width - LABEL - 4 });
}

function draftsInWords(record, row) {
  const drafts = record.drafts.get(row);
  return drafts ? `, ${record.numAccepted(row)} of ${drafts} drafts accepted` : "";
}

function kindOf(record, row) {
  return record.decodes[row] ? "decode" : "prefill";
}
