// The editor: CodeMirror with Python, and a mark on a line.
import { EditorState, StateEffect, StateField } from "@codemirror/state";
import {
  Decoration, EditorView, drawSelection, highlightActiveLine, highlightSpecialChars, keymap, lineNumbers,
} from "@codemirror/view";
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { python } from "@codemirror/lang-python";
import { classHighlighter } from "@lezer/highlight";

const setMark = StateEffect.define(); // a line number, or null
const mark = StateField.define({
  create: () => Decoration.none,
  update(marks, transaction) {
    let next = marks.map(transaction.changes);
    for (const effect of transaction.effects) {
      if (!effect.is(setMark)) continue;
      const { doc } = transaction.state;
      const line = effect.value && doc.line(Math.min(effect.value, doc.lines));
      next = line ? Decoration.set([Decoration.line({ class: "cm-fault" }).range(line.from)]) : Decoration.none;
    }
    return next;
  },
  provide: (field) => EditorView.decorations.from(field),
});

/** An editor in `parent`. `onChange(text)` after each change; `onRun()` at Ctrl+Enter. */
export class Editor {
  constructor(parent, { onChange, onRun }) {
    this.extensions = [
      lineNumbers(), highlightSpecialChars(), history(), drawSelection(), indentOnInput(), bracketMatching(),
      highlightActiveLine(), indentUnit.of("    "), python(), syntaxHighlighting(classHighlighter), mark,
      EditorView.lineWrapping,
      EditorView.contentAttributes.of({
        "aria-label": "Python code", tabindex: "0", autocapitalize: "off", spellcheck: "false",
      }),
      keymap.of([
        { key: "Mod-Enter", run: () => (onRun(), true) },
        // Tab leaves the editor after Escape, so that a keyboard is not caught in it.
        ...defaultKeymap, ...historyKeymap, indentWithTab,
      ]),
      EditorView.updateListener.of((update) => {
        if (update.docChanged) onChange(update.state.doc.toString());
      }),
    ];
    this.view = new EditorView({ parent });
    this.show("");
  }

  get text() {
    return this.view.state.doc.toString();
  }

  /** Show another text, with a history of its own. */
  show(text) {
    this.view.setState(EditorState.create({ doc: text, extensions: this.extensions }));
  }

  /** Replace the whole text, as the reader would: undo brings it back. */
  replace(text) {
    this.view.dispatch({ changes: { from: 0, to: this.view.state.doc.length, insert: text } });
  }

  /** Mark a line; null: none. */
  mark(line) {
    this.view.dispatch({ effects: setMark.of(line) });
  }

  destroy() {
    this.view.destroy();
  }
}
