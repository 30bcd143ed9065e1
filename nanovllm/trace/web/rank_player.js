// The player of ranks: its steps are the moments at which a rank begins something else.
import { TracePlayer } from "./player.js";
import { STATES, readRanks } from "./ranks.js";
import { StoryPanel, countOf } from "./story.js";
import { requestColor } from "./views.js";
import { RANKS_VIEW } from "./views_ranks.js";
import { clamp } from "./views_style.js";
import { renderWidget } from "./widget.js";

const MOST_NAMED = 6; // requests of a step
const MOST_EVENTS = 100; // of a request
// A moment is shown in proportion to its time, within these bounds: turns of the player's speed.
const BRIEFEST = 0.4;
const LONGEST = 4;

/** Make a player of ranks in an element; options as for `createPlayer`. */
export function createRankPlayer(root, options = {}) {
  return new RankPlayer(root, { ...options, views: ["ranks"] });
}

class RankPlayer extends TracePlayer {
  static VIEWS = { ranks: RANKS_VIEW };

  setHistory(history) {
    super.setHistory(history);
    this.views[0].figure.querySelector("figcaption").textContent = history.title || RANKS_VIEW.title;
  }

  _makeStory(select, seek) {
    return new RankStory(select, seek);
  }

  _positionText() {
    const { history, index } = this;
    return `${history.inMilliseconds(history.record(index).time)} of ${history.inMilliseconds(history.duration)} ms`;
  }

  _describe() {
    const { history, index } = this;
    const { time } = history.record(index);
    const states = history.rows.map((row) => [row.name, history.stateAt(row, time)]).filter(([, state]) => state);
    return [this._positionText(), ...states.map((words) => words.join(" "))].join(", ");
  }

  _turns(index) {
    const { history } = this;
    const lasting = history.record(index + 1).time - history.record(index).time;
    return clamp((lasting / history.duration) * (history.length - 1), BRIEFEST, LONGEST);
  }
}

/** What the player tells: of a moment each rank's state, of a rank its time by phase, of a request where it was computed. */
class RankStory extends StoryPanel {
  _tell(region) {
    const row = region?.kind === "rank" && this.history.rows.find(({ name }) => name === region.id);
    if (row) this._tellRank(row);
    else if (region?.kind === "request" && this.history.requests.has(region.id)) this._tellRequest(region.id);
    else this._tellMoment(region?.kind === "step" ? region.index : this.index);
  }

  _tellMoment(index) {
    const { history } = this;
    const { time } = history.record(index);
    this._title(`At ${history.inMilliseconds(time)} ms`);
    this._facts(history.rows.map((row) => [row.name, this._stateOf(row, time)]));
  }

  _stateOf(row, time) {
    const { history } = this;
    const state = history.stateAt(row, time);
    const span = history.spanAt(row, time);
    if (!span?.shares.length) return state;
    const line = this._chips(span.shares.slice(0, MOST_NAMED).map(([id]) => id));
    const tokens = span.shares.reduce((sum, [, each]) => sum + each, 0);
    line.prepend(`${state} step ${span.step}, ${countOf(tokens, "token")}:`);
    if (span.shares.length > MOST_NAMED) line.append(`and ${span.shares.length - MOST_NAMED} more`);
    return line;
  }

  _tellRank(row) {
    const { history } = this;
    const totals = history.totals(row);
    this._title(row.name);
    const share = (time) => `${history.inMilliseconds(time)} ms, ${Math.round((100 * time) / history.duration)} %`;
    const facts = Object.entries(STATES).map(([kind, words]) => [words, totals[kind] > 0 && share(totals[kind])]);
    this._facts([["now", history.stateAt(row, history.record(this.index).time)], ["steps", row.answers.length || ""], ...facts]);
  }

  _tellRequest(id) {
    const { history } = this;
    const { label, number } = history.requests.get(id);
    this._title(label, requestColor(number, this.theme));
    const found = [];
    for (const row of history.rows) {
      for (const { begin, shares } of row.spans) {
        for (const [each, tokens] of shares) if (each === id) found.push({ row, begin, tokens });
      }
    }
    found.sort((one, other) => one.begin - other.begin);
    this._list(found.slice(0, MOST_EVENTS).map(({ row, begin, tokens }) => {
      const what = `${row.name}, ${countOf(tokens, "token")}`;
      return this._momentLink(begin, what);
    }));
    if (found.length > MOST_EVENTS) this._say(`and ${found.length - MOST_EVENTS} more steps`);
  }

  _momentLink(time, what) {
    const { history } = this;
    return this._linked(`${history.inMilliseconds(time)} ms`, () => this.seek(history.indexAt(time)), what);
  }
}

/** The player of ranks as a notebook widget. */
export function renderRankWidget(context) {
  return renderWidget(context, createRankPlayer, readRanks);
}
