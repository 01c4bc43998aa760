// The shell: the bar, the routes, and what every view gets.

import { api } from "./api.js";
import { fill, h, iconButton } from "./dom.js";
import { keys } from "./keys.js";
import { shortcutsButton } from "./shortcuts.js";
import { store } from "./store.js";
import { applyTheme, themeButton } from "./theme.js";
import { toast } from "./toast.js";
import { VIEWS } from "./views/index.js";

const main = document.getElementById("main");
let current = null; // {view, unmount, watcher}
let numMounts = 0;

/** Split "#/live/ID" into the view and what follows; unknown names lead to the first view. */
function readRoute() {
  const [name, ...parts] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  return { view: VIEWS.find((one) => one.name === name) ?? VIEWS[0], parts: parts.filter(Boolean) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function show() {
  const { view, parts } = readRoute();
  if (current?.view === view && current.watcher) return current.watcher(parts);
  const turn = ++numMounts;
  current?.unmount?.();
  current = null;
  markTab(view);
  const element = h("div", { class: `view view-${view.name}` });
  fill(main, element);
  const mounted = { view, unmount: null, watcher: null };
  const route = {
    parts,
    go: (path) => { location.hash = `#/${path}`; },
    watch: (call) => { mounted.watcher = call; },
  };
  try {
    const module = await view.load();
    if (turn !== numMounts) return; // left meanwhile
    current = mounted;
    mounted.unmount = await module.mount(element, { api, keys, store, toast, route });
    if (turn !== numMounts) mounted.unmount?.();
  } catch (error) {
    console.error(error);
    fill(element, h("div", { class: "notice" }, h("p", { text: `This view could not be shown: ${error.message}. Is the server running?` }),
      h("button", { type: "button", text: "Load the page again", on: { click: () => location.reload() } })));
  }
}

function markTab(view) {
  document.title = VIEWS.length > 1 ? `${view.title} · Penstock` : "Penstock";
  for (const tab of document.querySelectorAll(".tab")) {
    if (tab.dataset.view === view.name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
}

function makeBar() {
  const tabs = VIEWS.map((view) => h("a", { class: "tab", href: `#/${view.name}`, dataset: { view: view.name }, text: view.title }));
  fill(document.getElementById("bar"),
    h("a", { class: "brand", href: "#/" }, h("img", { src: "page/icon.svg", alt: "", width: 22, height: 22 }), h("span", { text: "Penstock" })),
    VIEWS.length > 1 && h("nav", { class: "tabs", "aria-label": "Views" }, tabs),
    h("div", { class: "bar-buttons" },
      iconButton("key", "Keys", () => keys.edit()), shortcutsButton(), themeButton()));
}

applyTheme();
makeBar();
addEventListener("hashchange", show);
await show();
for (const view of VIEWS) view.load().catch(() => {}); // a server that has died since could not send them
