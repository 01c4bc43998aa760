// The chat: conversations at the left, messages in the middle, parameters at the right.

import { Composer } from "../chat/composer.js";
import { Panel } from "../chat/panel.js";
import { Session } from "../chat/session.js";
import { Sidebar } from "../chat/sidebar.js";
import { Thread } from "../chat/thread.js";
import { fill, h, iconButton } from "../dom.js";
import { addShortcut, MOD } from "../shortcuts.js";

const WIDE = matchMedia("(min-width: 1100px)");
const MIDDLE = matchMedia("(min-width: 760px)");
let session = null; // lives on while another view is shown

export async function mount(element, context) {
  if (!session) {
    session = new Session(context);
    await session.begin();
  } else session.loadModels();
  const view = new ChatView(element, context);
  return () => view.unmount();
}

class ChatView {
  #removals = [];

  constructor(element, { store }) {
    Object.assign(this, { element, store });
    this.thread = new Thread(session);
    this.composer = new Composer(session);
    this.panel = new Panel(session, { onclose: () => this.#toggle("panel", WIDE) });
    this.sidebar = new Sidebar(session, { onchoose: () => this.#choose() });
    this.title = h("h1", { class: "chat-title" });
    this.listButton = iconButton("menu", "Conversations", () => this.#toggle("sidebar", MIDDLE), { "aria-expanded": "false" });
    this.panelButton = iconButton("sliders", "Parameters", () => this.#toggle("panel", WIDE), { "aria-expanded": "false" });
    this.veil = h("div", { class: "veil", on: { click: () => this.#closeDrawers() } });
    fill(element, this.sidebar.element,
      h("section", { class: "chat-middle", "aria-label": "Chat" },
        h("header", { class: "chat-head" }, this.listButton, this.title, this.panelButton),
        this.thread.element, this.composer.element),
      this.panel.element, this.veil);
    this.#listen();
    this.#apply("sidebar", MIDDLE.matches && store.get("chat.sidebar", true));
    this.#apply("panel", WIDE.matches && store.get("chat.panel", false));
    this.#show();
    this.composer.focus();
  }

  #listen() {
    const on = (kind, call) => {
      const listener = (event) => call(event.detail);
      session.addEventListener(kind, listener);
      this.#removals.push(() => session.removeEventListener(kind, listener));
    };
    on("conversation", () => this.#show());
    on("conversation-name", () => this.#showTitle());
    on("models", () => {
      this.thread.show();
      this.panel.readDefaults();
      this.panel.show();
      this.composer.update();
    });
    on("settings", ({ name }) => {
      if (name === "model") this.panel.show();
      if (session.conversation.isEmpty) this.thread.show();
    });
    on("list", () => this.sidebar.update());
    on("piece", (piece) => this.thread.push(piece));
    on("ended", ({ node }) => this.thread.end(node));
    on("running", () => this.composer.update());
    const shortcut = (one) => this.#removals.push(addShortcut(one));
    shortcut({ keys: ["Enter"], does: "Send the message", matches: () => false });
    shortcut({ keys: ["Shift", "Enter"], does: "New line", matches: () => false });
    shortcut({ keys: ["Esc"], does: "Stop the answer, close a drawer", whileTyping: true, matches: (event) => event.key === "Escape" && this.#canEscape(), run: () => this.#escape() });
    shortcut({ keys: [MOD, "K"], does: "Conversations", whileTyping: true, matches: (event) => (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k", run: () => this.#openList() });
    shortcut({ keys: ["Alt", "N"], does: "New conversation", whileTyping: true, matches: (event) => event.altKey && event.code === "KeyN", run: () => { session.create(); this.#choose(); } });
    shortcut({ keys: ["Alt", "P"], does: "Parameters", whileTyping: true, matches: (event) => event.altKey && event.code === "KeyP", run: () => this.#toggle("panel", WIDE) });
    shortcut({ keys: ["/"], does: "Write a message", matches: (event) => event.key === "/", run: () => this.composer.field.focus() });
  }

  #canEscape() {
    return !document.querySelector("dialog[open]") && (session.isRunning() || this.#isDrawerOpen());
  }

  #escape() {
    if (this.#isDrawerOpen()) this.#closeDrawers();
    else session.stop();
  }

  #openList() {
    this.#apply("sidebar", true);
    this.sidebar.search.select();
    this.sidebar.search.focus();
  }

  #isDrawerOpen() {
    const { classList } = this.element;
    return (classList.contains("shows-sidebar") && !MIDDLE.matches) || (classList.contains("shows-panel") && !WIDE.matches);
  }

  #closeDrawers() {
    if (!MIDDLE.matches) this.#apply("sidebar", false);
    if (!WIDE.matches) this.#apply("panel", false);
  }

  #choose() {
    this.#closeDrawers();
    this.composer.focus();
  }

  #toggle(name, isBeside) {
    const shows = !this.element.classList.contains(`shows-${name}`);
    if (isBeside.matches) this.store.set(`chat.${name}`, shows);
    this.#apply(name, shows);
    if (shows) this[name].element.querySelector("input, select")?.focus({ preventScroll: true });
    else this.composer.focus();
  }

  #apply(name, shows) {
    this.element.classList.toggle(`shows-${name}`, shows);
    const button = name === "panel" ? this.panelButton : this.listButton;
    button.setAttribute("aria-expanded", String(shows));
    this[name].element.inert = !shows;
  }

  #show() {
    this.thread.show();
    this.composer.update();
    this.panel.show();
    this.sidebar.update();
    this.#showTitle();
  }

  #showTitle() {
    this.title.textContent = session.conversation.isEmpty ? "" : session.conversation.shownTitle;
  }

  unmount() {
    for (const remove of this.#removals) remove();
    this.thread.close();
  }
}
