// Light, dark, or as the system has it.

import { iconButton } from "./dom.js";
import { store } from "./store.js";

const THEMES = ["auto", "light", "dark"];
const ICONS = { auto: "auto", light: "sun", dark: "moon" };

export function applyTheme() {
  const theme = store.get("theme", "auto");
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

export function themeButton() {
  const make = () => {
    const theme = store.get("theme", "auto");
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    return iconButton(ICONS[theme] ?? "auto", `Theme: ${theme}. Change to ${next}`, (event) => {
      store.set("theme", next);
      applyTheme();
      const button = make();
      event.currentTarget.replaceWith(button);
      button.focus();
    });
  };
  return make();
}
