/** The page: a chat on the left, the engine on the right; or, for a recorded trace, the engine alone. */

import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Engine } from "./engine.js";
import { Load } from "./load.js";

byId("no-script").remove(); // an older browser does not come to this line: it cannot read the imports
const engine = new Engine({
  onHeader(settings) {
    const model = settings.model?.split("/").at(-1) ?? "";
    document.body.dataset.mode = settings.live ? "live" : "replay";
    document.title = `${model} · nanovllm${settings.live ? "" : " replay"}`;
    const { data_rank: rank, data_parallel_size: size } = settings.live ? {} : settings; // of a live one, a list says it
    setText(byId("model"), rank === undefined ? model : `${model}, data rank ${rank} of ${size}`);
    load.begin(settings);
    if (!settings.live) openTab("engine");
  },
  onSteps: () => chat.recolor(),
});
const load = new Load({ onRequests: (...request) => engine.name(...request) });
const chat = new Chat({
  onAnswer: (id) => engine.name(id, "you"),
  onShow(id) {
    openTab("engine");
    engine.show(id);
  },
  colorOf: (id) => engine.colorOf(id),
});

/** Both parts are shown where there is room; on a phone one of them. */
function openTab(name) {
  document.body.dataset.tab = name;
  for (const tab of tabs) {
    const selected = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
}

const tabs = [byId("tab-chat"), byId("tab-engine")];
for (const [i, tab] of tabs.entries()) {
  tab.onclick = () => openTab(tab.getAttribute("aria-controls"));
  tab.onkeydown = ({ key }) => {
    if (!["ArrowLeft", "ArrowRight"].includes(key)) return;
    tabs[1 - i].focus();
    tabs[1 - i].click();
  };
}

engine.run();
