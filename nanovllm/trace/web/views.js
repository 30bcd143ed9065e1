// The views that a player can show. Each has a title, `height(history, width, index)`, `draw(ctx, size,
// scene)` and `legend`, the marks that it explains. The context is scaled to CSS pixels; `size` is {width,
// height}, the scene is {history, index, selection, hover, theme, follow, settings}. `draw` returns what is
// where: regions {x, y, width, height, kind, id or index}, of which a later one lies above an earlier one.
import STYLE from "./style.json" with { type: "json" };
import { Theme } from "./views_style.js";
import { POOL_VIEW, TABLES_VIEW } from "./views_memory.js";
import { TIMELINE_VIEW } from "./views_timeline.js";
import { BUDGET_VIEW, QUEUES_VIEW, USAGE_VIEW } from "./views_steps.js";
import { ATTENTION_VIEW, BATCH_VIEW } from "./views_batch.js";

export const LIGHT = new Theme("light", STYLE, STYLE);
export const DARK = new Theme("dark", STYLE, STYLE.dark);

// The fill colour of the request that appeared `number`-th, counted from 0.
export function requestColor(number, theme) {
  return theme.fill(number);
}

export const VIEWS = {
  tables: TABLES_VIEW,
  pool: POOL_VIEW,
  timeline: TIMELINE_VIEW,
  budget: BUDGET_VIEW,
  queues: QUEUES_VIEW,
  usage: USAGE_VIEW,
  attention: ATTENTION_VIEW,
  batch: BATCH_VIEW,
};
