// The entry of all labs' pages. From lab to lab the page stays, and with it the loaded Python.
import { Contest } from "./contest.js";
import { Lab } from "./edit.js";
import { find } from "./elements.js";
import { Python } from "./python.js";
import { WhatIf } from "./what_if.js";

const KINDS = { edit: Lab, contest: Contest, "what-if": WhatIf };

function open(python) {
  const { kind } = JSON.parse(find("lab").textContent).lab;
  return new KINDS[kind](python);
}

/** On a phone the bar of labs scrolls: show the link of this one. */
function showLink() {
  const link = document.querySelector("nav.labs [aria-current]");
  if (link) link.parentElement.scrollLeft = link.offsetLeft - link.parentElement.offsetLeft - 16;
}

let lab = null;
const python = find("lab") ? new Python(() => lab?.showState()) : null; // the list of labs needs none
if (python) lab = open(python);
showLink();
// For tests, and for the curious.
window.nanovllmLab = { get lab() { return lab; }, python };

find("theme").onclick = () => {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
  dataset.mode = dataset.theme;
  localStorage.setItem("mode", dataset.mode);
  localStorage.setItem("theme", dataset.theme);
};

async function go(href, isBack = false) {
  const response = await fetch(href);
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (!response.ok || !page.getElementById("lab")) return location.assign(href);
  if (!isBack) history.pushState(null, "", href);
  lab.destroy();
  document.title = page.title;
  for (const place of ["main", "nav.labs"]) {
    document.querySelector(place).replaceWith(document.adoptNode(page.querySelector(place)));
  }
  scrollTo(0, 0);
  showLink();
  lab = open(python);
  find("main").focus();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-lab]");
  if (!python || !link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.href);
});
addEventListener("popstate", () => python && go(location.href, true));
