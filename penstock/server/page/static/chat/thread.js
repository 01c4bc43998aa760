// The messages of the branch that is shown, and where the page is scrolled to.

import { MessageView } from "./messages/message_view.js";
import { fill, h, iconButton } from "../dom.js";

const NEAR_PX = 80;

export class Thread {
  #views = new Map();
  #sticks = true; // follows what is written

  constructor(session) {
    this.session = session;
    this.list = h("div", { class: "messages" });
    this.jump = iconButton("down", "To the latest", () => this.scrollToEnd(), { hidden: true });
    this.jump.classList.add("jump");
    this.status = h("div", { class: "offscreen", role: "status" });
    this.scroller = h("div", { class: "scroller", tabindex: "-1" }, this.list);
    this.element = h("div", { class: "thread" }, this.scroller, this.jump, this.status);
    this.scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
  }

  #noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.#sticks = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.jump.hidden = this.#sticks;
  }

  scrollToEnd() {
    this.#sticks = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Show the branch anew; messages that stay keep their elements. */
  show() {
    const path = this.session.conversation.path();
    const names = new Map();
    const before = this.#views;
    this.#views = new Map();
    const isSame = path.length && before.has(path[0].id);
    path.forEach((node, at) => {
      for (const call of node.toolCalls ?? []) names.set(call.id, call.name);
      this.#views.set(node.id, this.#reuse(before, node, at < path.length - 1, names));
    });
    for (const view of before.values()) view.close();
    fill(this.list, path.length ? [...this.#views.values()].map((view) => view.element) : this.#makeWelcome());
    if (this.#sticks || !isSame) this.scrollToEnd();
  }

  #reuse(before, node, isAnswered, names) {
    const key = this.#describe(node, isAnswered);
    const old = before.get(node.id);
    before.delete(node.id);
    if (old?.key === key && !old.element.classList.contains("editing")) return old;
    old?.close();
    const view = new MessageView(node, this.session, { isAnswered, names });
    view.key = key;
    if (view.answer) view.answer.onshow = () => this.follow();
    return view;
  }

  #describe(node, isAnswered) {
    const { conversation } = this.session;
    return [conversation.id, node.status, isAnswered, conversation.siblingsOf(node).length, this.session.isWriting(node)].join();
  }

  follow() {
    if (this.#sticks) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  push({ node, kind, text }) {
    this.#views.get(node.id)?.push(kind, text);
  }

  end(node) {
    const view = this.#views.get(node.id);
    if (!view) return;
    view.end();
    view.key = this.#describe(node, view.isAnswered);
    this.follow();
    const { completion } = node.figures ?? {};
    this.status.textContent = node.error ? `The answer failed: ${node.error}` : `The answer has ended${completion ? `: ${completion} tokens` : ""}.`;
  }

  #makeWelcome() {
    const { models, modelsError, model } = this.session;
    const lines = modelsError
      ? [h("h1", { text: modelsError.status === 401 ? "A key is needed" : "No models to talk to" }), h("p", { class: "error-text", role: "alert", text: modelsError.message }),
        h("button", { type: "button", text: "Try again", on: { click: () => this.session.loadModels() } })]
      : models.length
        ? [h("h1", { text: "What shall we talk about?" }), h("p", { text: `${model.id} answers${model.max_model_len ? `, with a context of ${model.max_model_len.toLocaleString("en")} tokens` : ""}. Conversations stay in this browser.` })]
        : [h("h1", { text: "A moment …" })];
    return h("div", { class: "welcome" }, lines);
  }

  close() {
    for (const view of this.#views.values()) view.close();
  }
}
