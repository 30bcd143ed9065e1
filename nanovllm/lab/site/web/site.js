// What all pages share: the switch of the theme on pages that are not the documentation theme's, and controls for films.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");

/** The theme that the reader has chosen on any page, or else the system's: the documentation theme stores it in "mode". */
function showTheme() {
  const mode = localStorage.getItem("mode") || "auto";
  root.dataset.theme = mode === "dark" || (mode !== "light" && dark.matches) ? "dark" : "light";
}

const button = document.querySelector(".bar .theme");
if (button) {
  showTheme();
  dark.addEventListener("change", showTheme);
  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("mode", theme);
    localStorage.setItem("theme", theme);
    showTheme();
  });
}

// Paper is white.
let chosen = "";
addEventListener("beforeprint", () => {
  chosen = root.dataset.theme;
  root.dataset.theme = "light";
});
addEventListener("afterprint", () => (root.dataset.theme = chosen));

// What is wide scrolls by itself, and fades at its right edge until the reader has scrolled to its end.
const WIDE = ".bd-article :is(pre, .pst-scrollable-table-container, .cell_output, div.math, mjx-container), .scroll, .source .highlight, .paths pre";

/** Whether something goes on beyond its right edge. */
function goesOn(box) {
  return getComputedStyle(box).overflowX !== "visible" && box.scrollWidth - box.clientWidth - box.scrollLeft > 1;
}

function showEdges(boxes) {
  const areCut = boxes.map(goesOn);
  for (const [index, box] of boxes.entries()) box.toggleAttribute("data-goes-on", areCut[index]);
}

addEventListener("load", async () => {
  await window.MathJax?.startup?.promise;
  for (const formula of document.querySelectorAll('mjx-container[display="true"]')) formula.tabIndex = 0; // for the keyboard
  const sizes = new ResizeObserver((entries) => showEdges(entries.map(({ target }) => target)));
  for (const box of document.querySelectorAll(WIDE)) {
    sizes.observe(box);
    box.addEventListener("scroll", () => showEdges([box]), { passive: true });
  }
});

// The theme's name for this button lacks the keys that it shows.
for (const field of document.querySelectorAll(".search-button-field")) field.removeAttribute("aria-label");

// The theme scrolls the sidebar to where it was on another page; without this, it scrolls to this page's entry.
sessionStorage.removeItem("sidebar-scroll-top");

// On a phone the sidebars are drawers: a link in one leads to what the drawer would cover.
for (const drawer of document.querySelectorAll("#pst-primary-sidebar-modal, #pst-secondary-sidebar-modal")) {
  drawer.addEventListener("click", (event) => {
    if (event.target.closest("a")) drawer.close();
  });
}
