/** Text of a model as nodes: fenced code, `code` and **strong** are understood, all else is plain text.
 *
 * Only text nodes are made of it, so nothing a model writes can become markup. */

import { button, copyText, element } from "./dom.js";

/** Nodes for a text, which may still be growing: a fence that is not closed yet is code to its end. */
export function prose(text) {
  return text.split(/^```/m).flatMap((part, i) => {
    if (i % 2 === 0) return paragraphs(part);
    const [first, ...code] = part.split("\n");
    return [codeBlock(first.trim(), code.join("\n").replace(/\n$/, ""))];
  });
}

function paragraphs(text) {
  const blocks = text.replace(/^\n+|\n+$/g, "").split(/\n{2,}/);
  return blocks.filter(Boolean).map((block) => element("p", {}, ...spans(block)));
}

function spans(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (/^`.+`$/.test(part)) return element("code", {}, part.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(part)) return element("strong", {}, part.slice(2, -2));
    return part;
  });
}

function codeBlock(language, code) {
  const copy = copyButton("Copy code", () => code);
  return element("figure", { className: "code" },
    element("figcaption", {}, element("span", {}, language), copy),
    element("pre", { tabIndex: 0 }, element("code", {}, code)));
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(label, text) {
  const node = button(label, async () => {
    try {
      await copyText(text());
      node.textContent = "Copied";
    } catch (error) {
      node.textContent = `Not copied: ${error.message}`;
    }
    setTimeout(() => (node.textContent = label), 1500);
  }, { className: "quiet" });
  return node;
}
