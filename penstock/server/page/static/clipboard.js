// Copies text; also on pages without TLS, where browsers have no clipboard interface.

import { fill, h, icon } from "./dom.js";

const SHOWN_MS = 1500;

/** Copy `text`, and show on the button that it was done. */
export async function copyText(text, button) {
  const done = await write(text);
  if (!button) return;
  fill(button, icon(done ? "check" : "cross"));
  setTimeout(() => fill(button, icon("copy")), SHOWN_MS);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "offscreen", value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
