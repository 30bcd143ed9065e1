/** Small helpers to build and read the page. Text always goes in as text, never as markup. */

/** An element of the page by its id. */
export const byId = (id) => document.getElementById(id);

/** A new element: properties are set as they are, children are nodes or strings, null leaves one out. */
export function element(tag, properties = {}, ...children) {
  const { dataset = {}, ...others } = properties;
  const node = Object.assign(document.createElement(tag), others);
  Object.assign(node.dataset, dataset);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** A button with a label that is read aloud and shown. */
export const button = (label, onclick, properties = {}) =>
  element("button", { type: "button", onclick, ...properties }, label);

/** Show one of two buttons that stand in the same place; the focus stays there. */
export function showOne(shown, hidden) {
  const focused = document.activeElement === hidden;
  shown.hidden = false;
  hidden.hidden = true;
  if (focused) shown.focus();
}

/** Set the text of a node, and touch the page only if it is new. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** "1 token", "2 tokens". */
export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** Seconds as people read them: "85 ms", "0.85 s", "12 s". */
export function seconds(value) {
  if (value < 0.1) return `${Math.round(value * 1000)} ms`;
  return `${value < 10 ? value.toFixed(2) : Math.round(value)} s`;
}

/** Put a text on the clipboard; the old way too, since browsers keep the new one from pages without https. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { value: text, className: "visually-hidden" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser does not let this page copy");
}
