// A message with its buttons: copy, edit, regenerate, and the way to its siblings.

import { AnswerView } from "./answer_view.js";
import { makeResultsView } from "./calls_view.js";
import { MAX_SHOWN_CHARS } from "../limits.js";
import { copyText } from "../../clipboard.js";
import { fill, h, iconButton, newId } from "../../dom.js";

/** Make a sent message; of a long one the beginning, and a button for the rest. */
function makeSaid(text) {
  const said = h("div", { class: "said", text: text.slice(0, MAX_SHOWN_CHARS) });
  if (text.length <= MAX_SHOWN_CHARS) return said;
  const more = h("button", {
    type: "button", class: "link", text: ` … show all ${text.length.toLocaleString("en")} characters`,
    on: { click: () => { said.textContent = text; } },
  });
  said.append(more);
  return said;
}

export class MessageView {
  constructor(node, session, { isAnswered, names }) {
    Object.assign(this, { node, session, isAnswered });
    this.body = h("div", { class: "message-body" });
    this.buttons = h("div", { class: "message-buttons" });
    const label = { user: "You", assistant: node.model ? `Answer of ${node.model}` : "Answer", tool: "Results" }[node.role];
    this.element = h("article", { class: `message ${node.role}`, "aria-label": label, dataset: { id: node.id } });
    if (node.role === "assistant") this.element.append(h("div", { class: "author", text: node.model ?? "answer" }));
    this.element.append(this.body, this.buttons);
    this.#fillBody(names);
    this.#fillButtons();
  }

  #fillBody(names) {
    const { node, session } = this;
    if (node.role === "user") fill(this.body, makeSaid(node.content));
    else if (node.role === "tool") fill(this.body, makeResultsView(node.results ?? [], names));
    else {
      const sendResults = this.isAnswered ? null : (results) => session.sendResults(node, results);
      this.answer = new AnswerView(node, { isWriting: session.isWriting(node), sendResults });
      fill(this.body, this.answer.element);
      if (!session.isWriting(node)) this.answer.end(this.#makeRetry());
    }
  }

  #makeRetry() {
    const { node, session } = this;
    if (!["broken", "failed", "stopped"].includes(node.status) && node.finish !== "length") return null;
    const isText = !node.form || node.form === "text"; // a form would begin anew
    const canContinue = isText && node.content && !node.toolCalls?.length && !this.isAnswered && node.status !== "failed";
    const buttons = [];
    if (canContinue) buttons.push(h("button", { type: "button", text: "Continue", on: { click: () => session.continueAnswer(node) } }));
    if (node.error) buttons.push(h("button", { type: "button", text: "Try again", on: { click: () => session.regenerate(node) } }));
    return buttons.length ? h("div", { class: "retry" }, buttons) : null;
  }

  push(kind, text) {
    this.answer?.push(kind, text);
  }

  end() {
    this.answer?.end(this.#makeRetry());
    this.#fillButtons();
  }

  #fillButtons() {
    const { node, session } = this;
    const isWriting = session.isWriting(node);
    const copy = iconButton("copy", "Copy", () => copyText(node.content, copy));
    fill(this.buttons,
      this.#makeTurn(),
      node.content && !isWriting && copy,
      node.role === "user" && iconButton("pencil", "Edit, as a new branch", () => this.#edit((text) => session.edit(node, text), "Send")),
      node.role === "assistant" && !isWriting && [
        iconButton("again", "Answer again, as a new branch", () => session.regenerate(node)),
        iconButton("pencil", "Edit this answer, as a new branch", () => this.#edit((text) => session.editAnswer(node, text), "Keep")),
        node.tokens && this.#makeTokensButton(),
      ]);
  }

  #makeTokensButton() {
    const button = iconButton("chart", "Tokens and their shares", () => button.setAttribute("aria-pressed", String(this.answer.toggleTokens())), { "aria-pressed": "false" });
    return button;
  }

  #makeTurn() {
    const siblings = this.session.conversation.siblingsOf(this.node);
    if (siblings.length < 2) return null;
    const at = siblings.indexOf(this.node.id);
    const button = (name, label, step, disabled) => iconButton(name, label, () => this.session.turn(this.node, step), { disabled });
    return h("div", { class: "turn", role: "group", "aria-label": `Branch ${at + 1} of ${siblings.length}` },
      button("left", "Branch before", -1, at === 0),
      h("span", { text: `${at + 1} / ${siblings.length}` }),
      button("right", "Branch after", 1, at === siblings.length - 1));
  }

  #edit(done, yes) {
    const id = newId("edit");
    const field = h("textarea", { id, class: "edit-field", rows: String(Math.min(16, this.node.content.split("\n").length + 1)), value: this.node.content, "aria-label": "Text of this message" });
    const cancel = () => {
      this.answer?.close();
      this.#fillBody(new Map());
      this.buttons.hidden = false;
      this.element.classList.remove("editing");
    };
    const accept = () => field.value.trim() && done(field.value);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) accept();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.buttons.hidden = true;
    this.element.classList.add("editing");
    fill(this.body, field, h("div", { class: "dialog-buttons" },
      h("button", { type: "button", text: "Cancel", on: { click: cancel } }),
      h("button", { type: "button", class: "primary", text: yes, on: { click: accept } })));
    field.focus();
  }

  close() {
    this.answer?.close();
  }
}
