// Short notices at the edge of the page, read aloud by screen readers.

import { h, iconButton } from "./dom.js";

const SHOWN_MS = 6000;
const MAX_SHOWN = 4;

/** Show a notice. `kind` is "info" or "error"; errors stay until they are dismissed. */
export function toast(text, kind = "info") {
  const area = document.getElementById("toasts");
  const notice = h("div", { class: `toast ${kind}`, role: kind === "error" ? "alert" : undefined },
    h("span", { text }), iconButton("cross", "Dismiss", () => notice.remove()));
  area.append(notice);
  while (area.childElementCount > MAX_SHOWN) area.firstElementChild.remove();
  if (kind !== "error") setTimeout(() => notice.remove(), SHOWN_MS);
}
