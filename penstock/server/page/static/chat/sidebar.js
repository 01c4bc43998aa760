// The list of conversations: search, rename, delete, export, import.

import { chooseFile, exportConversations } from "./transfer.js";
import { MAX_TITLE_CHARS } from "./limits.js";
import { confirmDialog, fill, h, iconButton, newId, showDialog } from "../dom.js";

const TYPING_MS = 150;
const DAY_MS = 86_400_000;

function nameDay(ms) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (ms >= midnight) return "Today";
  if (ms >= midnight - DAY_MS) return "Yesterday";
  if (ms >= midnight - 7 * DAY_MS) return "Last seven days";
  return new Date(ms).toLocaleDateString("en", { month: "long", year: "numeric" });
}

export class Sidebar {
  #timer = 0;
  #turn = 0;

  constructor(session, { onchoose }) {
    Object.assign(this, { session, onchoose });
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", on: { input: () => this.#searchSoon() } });
    this.list = h("nav", { class: "conversations", "aria-label": "Conversations" });
    this.element = h("aside", { class: "chat-sidebar", "aria-label": "Conversations" },
      h("div", { class: "sidebar-head" },
        h("button", { type: "button", class: "new-chat", on: { click: () => this.#create() } }, "New conversation"),
        this.search),
      this.list,
      h("div", { class: "sidebar-foot" },
        h("button", { type: "button", text: "Import", on: { click: () => this.#import() } }),
        h("button", { type: "button", text: "Export all", on: { click: () => this.#exportAll() } })));
    this.update();
  }

  #create() {
    this.session.create();
    this.onchoose();
  }

  #searchSoon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.update(), TYPING_MS);
  }

  async update() {
    const turn = ++this.#turn;
    const found = await this.session.storage.list(this.search.value);
    if (turn !== this.#turn) return;
    const focused = document.activeElement?.closest?.(".conversation")?.dataset.id;
    let day = "";
    const rows = found.flatMap((one) => {
      const heading = nameDay(one.updated) === day ? [] : [h("h2", { text: (day = nameDay(one.updated)) })];
      return [...heading, this.#makeRow(one)];
    });
    const none = this.search.value.trim() ? "Nothing found." : "Conversations appear here.";
    fill(this.list, rows.length ? rows : h("p", { class: "muted", text: none }));
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"] .conversation-name`)?.focus();
  }

  #makeRow({ id, title }) {
    const isCurrent = id === this.session.conversation.id;
    const choose = () => {
      this.session.select(id);
      this.onchoose();
    };
    return h("div", { class: "conversation", dataset: { id } },
      h("button", { type: "button", class: "conversation-name", title, text: title, "aria-current": isCurrent ? "true" : undefined, on: { click: choose } }),
      h("div", { class: "conversation-buttons" },
        iconButton("pencil", `Rename ${title}`, () => this.#rename(id, title)),
        iconButton("export", `Export ${title}`, () => this.#export(id)),
        iconButton("trash", `Delete ${title}`, () => this.#delete(id, title))));
  }

  async #rename(id, title) {
    const field = newId("title");
    const input = h("input", { id: field, value: title, maxlength: MAX_TITLE_CHARS });
    const dialog = h("dialog", { class: "dialog", "aria-label": "Rename the conversation" });
    dialog.append(h("div", { class: "field" }, h("label", { for: field, text: "Name" }), input),
      h("div", { class: "dialog-buttons" },
        h("button", { type: "button", text: "Cancel", on: { click: () => dialog.close("") } }),
        h("button", { type: "button", class: "primary", text: "Rename", on: { click: () => dialog.close("yes") } })));
    input.addEventListener("keydown", (event) => event.key === "Enter" && dialog.close("yes"));
    setTimeout(() => input.select());
    if ((await showDialog(dialog)) === "yes") this.session.rename(id, input.value);
  }

  async #delete(id, title) {
    if (await confirmDialog(`Delete “${title}”? It is kept in this browser alone and cannot be brought back.`, "Delete")) this.session.remove(id);
  }

  async #export(id) {
    const found = id === this.session.conversation.id ? this.session.conversation : await this.session.storage.read(id);
    if (found) exportConversations([found], `penstock-${found.shownTitle.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}`);
  }

  async #exportAll() {
    const all = await this.session.storage.readAll();
    if (all.length) exportConversations(all, "penstock-conversations");
    else this.session.toast("There is nothing to export yet.");
  }

  async #import() {
    try {
      const found = await chooseFile();
      if (found === null) return;
      await this.session.adopt(found);
      this.session.toast(`${found.length} ${found.length === 1 ? "conversation was" : "conversations were"} imported.`);
    } catch (error) {
      this.session.toast(error.message, "error");
    }
  }
}
