// API keys: asked for when the server wants one, kept in this tab alone (sessionStorage).

import { h, newId, showDialog } from "./dom.js";

const KINDS = {
  api: { item: "penstock.apiKey", title: "API key", why: "This server answers to those who have a key." },
  admin: { item: "penstock.adminKey", title: "Admin key", why: "This part of the page is for the server's admin." },
};
const asked = new Map(); // kind → the dialog's promise: several requests ask once
const inMemory = new Map();

export const keys = {
  /** Return the key of a kind, "api" or "admin"; "" if there is none. */
  get(kind) {
    try {
      return sessionStorage.getItem(KINDS[kind].item) ?? "";
    } catch {
      return inMemory.get(kind) ?? "";
    }
  },

  set(kind, value) {
    try {
      if (value) sessionStorage.setItem(KINDS[kind].item, value);
      else sessionStorage.removeItem(KINDS[kind].item);
    } catch {
      inMemory.set(kind, value);
    }
  },

  /** Ask for a key; resolves with true if one was given. */
  ask(kind, reason = "") {
    if (!asked.has(kind)) asked.set(kind, ask(kind, reason).finally(() => asked.delete(kind)));
    return asked.get(kind);
  },

  /** Show both keys, to change or to forget them. */
  async edit() {
    const dialog = h("dialog", { class: "dialog", "aria-label": "Keys" });
    const fields = Object.keys(KINDS).map((kind) => [kind, makeField(kind, keys.get(kind))]);
    await runForm(dialog, [
      h("h2", { text: "Keys" }),
      h("p", { class: "muted", text: "Kept in this tab, and forgotten when it is closed. Leave a field empty to forget its key." }),
      ...fields.map(([, field]) => field.row),
    ], "Keep", () => fields.forEach(([kind, field]) => keys.set(kind, field.input.value.trim())));
  },
};

async function ask(kind, reason) {
  const { title, why } = KINDS[kind];
  const dialog = h("dialog", { class: "dialog", "aria-label": title });
  const field = makeField(kind, "");
  return runForm(dialog, [
    h("h2", { text: title }),
    h("p", { text: reason || why }),
    field.row,
    h("p", { class: "muted", text: "It is kept in this tab, and forgotten when the tab is closed." }),
  ], "Continue", () => keys.set(kind, field.input.value.trim()), () => field.input.value.trim() !== "");
}

function makeField(kind, value) {
  const id = newId("key");
  const input = h("input", { id, type: "password", autocomplete: "off", spellcheck: "false", value });
  return { input, row: h("div", { class: "field" }, h("label", { for: id, text: KINDS[kind].title }), input) };
}

/** Show a form in a dialog; true if it was sent. A form element would need form-action in the policy. */
async function runForm(dialog, content, yes, accept, isFilled = () => true) {
  const send = () => {
    if (!isFilled()) return;
    accept();
    dialog.close("yes");
  };
  dialog.append(...content, h("div", { class: "dialog-buttons" },
    h("button", { type: "button", text: "Cancel", on: { click: () => dialog.close("") } }),
    h("button", { type: "button", class: "primary", text: yes, on: { click: send } })));
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target instanceof HTMLInputElement) send();
  });
  return (await showDialog(dialog)) === "yes";
}
