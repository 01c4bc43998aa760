// Keyboard shortcuts: views register theirs, "?" lists them.

import { h, iconButton, showDialog } from "./dom.js";

const registered = new Set();
export const MOD = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";

/** Register {keys, does, matches(event), run(event)}; returns a function that removes it. One without `run` is only
 * listed. */
export function addShortcut(shortcut) {
  registered.add(shortcut);
  return () => registered.delete(shortcut);
}

function isTyping(event) {
  return event.target instanceof HTMLElement && event.target.matches("input, textarea, select, [contenteditable]");
}

addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") && event.key !== "Escape") return;
  for (const one of registered) {
    if (!one.run || !one.matches(event) || isTyping(event) && !one.whileTyping) continue;
    event.preventDefault();
    return one.run(event);
  }
});

function showShortcuts() {
  const dialog = h("dialog", { class: "dialog", "aria-label": "Keyboard shortcuts" });
  const rows = [...registered].map((one) => h("div", { class: "shortcut" },
    h("dt", {}, one.keys.map((key) => h("kbd", { text: key }))), h("dd", { text: one.does })));
  dialog.append(h("h2", { text: "Keyboard" }), h("dl", { class: "shortcuts" }, rows),
    h("div", { class: "dialog-buttons" }, h("button", { type: "button", class: "primary", text: "Close", on: { click: () => dialog.close() } })));
  showDialog(dialog);
}

export function shortcutsButton() {
  return iconButton("help", "Keyboard shortcuts", showShortcuts);
}

addShortcut({ keys: ["?"], does: "Show this list", matches: (event) => event.key === "?", run: showShortcuts });
