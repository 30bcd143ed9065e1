// How JupyterLab shows lectures. Lines that a cell repeats from an earlier cell are paler than its new lines;
// which lines these are is in the cell's metadata (nanovllm/lab/course/unchanged.py). And a hidden output, which
// answers a prediction, says so: JupyterLab would show its first line. And films have controls. This is the container
// that webpack would make of a prebuilt extension; JupyterLab shares its own modules with it.

(() => {
  const STYLE = `
    .nanovllm-unchanged { opacity: 0.45; }
    .jp-OutputPlaceholder .jp-PlaceholderText { font-size: 0; }
    .jp-OutputPlaceholder .jp-PlaceholderText::after {
      content: "The output is hidden: click to show it"; font-size: var(--jp-code-font-size);
    }`;

  // The highest version of a module that JupyterLab shares.
  const shared = async (scope, name) => {
    const versions = Object.keys(scope[name]).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    return (await scope[name][versions.at(-1)].get())();
  };

  // Decorations of whole lines: a field of the editor's state. What the reader types moves them along.
  const paleLines = (ranges, { StateField }, { Decoration, EditorView }) => {
    const pale = Decoration.line({ class: "nanovllm-unchanged" });
    const decorate = (doc, positions) => {
      const starts = new Set(positions.map((position) => doc.lineAt(position).from));
      return { positions, lines: Decoration.set([...starts].map((start) => pale.range(start))) };
    };
    return StateField.define({
      create: ({ doc }) => {
        const positions = []; // of each line's first character
        for (const range of ranges.split(" ")) { // "2-5" or "9"
          const [first, last = first] = range.split("-").map(Number);
          for (let line = first; line <= last; line++) positions.push(doc.line(line).from);
        }
        return decorate(doc, positions);
      },
      update: (value, { docChanged, changes, newDoc }) =>
        docChanged ? decorate(newDoc, value.positions.map((each) => changes.mapPos(each, 1))) : value,
      provide: (field) => EditorView.decorations.from(field, ({ lines }) => lines),
    });
  };

  let scope = null;
  const FILM = new URL("film.js", document.currentScript.src).href;

  const extension = async () => {
    const [codemirror, state, view] = await Promise.all(
      ["@jupyterlab/codemirror", "@codemirror/state", "@codemirror/view"].map((name) => shared(scope, name)));
    const plugin = {
      id: "nanovllm-course:lectures",
      description: "Shows what is new in cells of lectures.",
      autoStart: true,
      requires: [codemirror.IEditorExtensionRegistry],
      activate: (app, registry) => {
        document.head.append(Object.assign(document.createElement("style"), { textContent: STYLE }));
        // Events of images do not bubble.
        const seen = ({ target }) => {
          if (target.matches?.('.jp-RenderedMarkdown img[src*=".gif"]')) import(FILM).then((film) => film.showFilm(target));
        };
        document.addEventListener("load", seen, true);
        registry.addExtension({
          name: "nanovllm-course:lectures",
          factory: ({ model }) => {
            const found = model.getMetadata?.("nanovllm");
            // A cell that was edited after its lines were counted is shown as it is.
            if (!found?.unchanged || found.length !== model.sharedModel.getSource().length) return null;
            const lines = paleLines(found.unchanged, state, view);
            return codemirror.EditorExtensionRegistry.createImmutableExtension(lines);
          },
        });
      },
    };
    return () => ({ __esModule: true, default: plugin });
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB["nanovllm-course"] = {
    init: (shareScope) => { scope = shareScope; },
    get: (module) => extension(module),
  };
})();
