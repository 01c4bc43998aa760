// An answer, while it is written and after.

import { makeCallsView } from "./calls_view.js";
import { makeFigures } from "./figures.js";
import { readSchema } from "../params.js";
import { checkValue, JsonCheck } from "../schema.js";
import { makeTokensView } from "./tokens_view.js";
import { fill, h } from "../../dom.js";
import { MarkdownStream } from "../../markdown/stream.js";

const SILENCE_MS = 8000;

export class AnswerView {
  #pending = { content: [], reasoning: [] };
  #frame = 0;
  #silence = 0;
  #json = null;
  #showsTokens = false;

  /** `actions`: sendResults(results), or null where calls are answered already. */
  constructor(node, { isWriting, sendResults }) {
    Object.assign(this, { node, sendResults });
    this.content = h("div", { class: "markdown" });
    this.thinking = h("div", { class: "markdown" });
    this.summary = h("summary", { text: "Reasoning" });
    this.reasoning = h("details", { class: "reasoning", hidden: true }, this.summary, this.thinking);
    this.calls = h("div", {});
    this.mark = h("div", { class: "mark", role: "status", hidden: true });
    this.tokens = h("div", { hidden: true });
    this.notice = h("div", { class: "answer-notice", hidden: true });
    this.caret = h("span", { class: "caret", "aria-hidden": "true", hidden: !isWriting });
    this.footer = h("div", {});
    this.element = h("div", { class: "answer", "aria-busy": String(isWriting) },
      this.reasoning, this.content, this.tokens, this.caret, this.calls, this.mark, this.notice, this.footer);
    this.#begin();
    if (isWriting) this.#watchSilence();
  }

  #begin() {
    const { node } = this;
    this.streams = { content: null, reasoning: new MarkdownStream(this.thinking) };
    if (node.form && node.form !== "text") {
      this.#json = new JsonCheck();
      this.source = document.createTextNode("");
      this.content.append(h("pre", { class: "json", tabindex: "0", "aria-label": "JSON" }, h("code", {}, this.source)));
    } else this.streams.content = new MarkdownStream(this.content);
    if (node.reasoning) this.#pending.reasoning.push(node.reasoning);
    if (node.content) this.#pending.content.push(node.content);
    if (node.toolCalls) this.#showCalls(false);
    this.#show();
  }

  /** Add a piece that has arrived; it is shown with the next frame. */
  push(kind, text) {
    if (kind === "content" || kind === "reasoning") this.#pending[kind].push(text);
    else if (kind === "calls") this.areCallsNew = true;
    this.#watchSilence();
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#show();
    });
  }

  #show() {
    for (const kind of ["reasoning", "content"]) {
      const text = this.#pending[kind].join("");
      this.#pending[kind] = [];
      if (text) this.#add(kind, text);
    }
    if (this.areCallsNew) this.#showCalls(false);
    this.areCallsNew = false;
    this.onshow?.();
  }

  #add(kind, text) {
    if (kind === "reasoning") this.#showReasoning();
    const stream = this.streams[kind];
    if (stream) {
      stream.push(text);
      return stream.flush();
    }
    this.source.appendData(text);
    this.#json.push(text);
    this.#showMark();
  }

  #showReasoning() {
    this.reasoning.hidden = false;
    this.summary.textContent = this.node.content || this.node.status !== "writing" ? "Reasoning" : "Reasoning …";
  }

  #showCalls(isAnswerable) {
    fill(this.calls, this.node.toolCalls?.length ? makeCallsView(this.node.toolCalls, isAnswerable ? this.sendResults : null) : null);
  }

  #showMark() {
    const [kind, text] = this.#judge();
    this.mark.className = `mark ${kind}`;
    this.mark.hidden = false;
    if (this.mark.textContent !== text) this.mark.textContent = text;
  }

  /** Say how the JSON stands: begun, valid, or what is wrong with it. */
  #judge() {
    const { state, numChars } = this.#json;
    if (state === "broken") return ["bad", `Not JSON: character ${numChars + 1} does not fit`];
    if (state === "begun") return this.node.status === "writing" ? ["open", "JSON so far"] : ["bad", "Not complete: the JSON ends too early"];
    const read = this.node.form === "json_schema" ? readSchema(this.node.schema) : { value: true };
    const fault = read.error ? null : checkValue(JSON.parse(this.node.content), read.value);
    if (fault) return ["bad", `Does not fit the schema: ${fault}`];
    return ["good", this.node.form === "json_schema" && !read.error ? "Valid by the schema" : "Valid JSON"];
  }

  #watchSilence() {
    clearTimeout(this.#silence);
    if (!this.caret.hidden && !this.node.error) this.notice.hidden = true;
    this.#silence = setTimeout(() => {
      fill(this.notice, h("p", { class: "muted", text: "Nothing has come for a while. The model may be loading, or its engine busy or starting again after a crash; the answer will go on." }));
      this.notice.hidden = false;
    }, SILENCE_MS);
  }

  /** The answer has ended: show its figures, and what went wrong. */
  end(retry = null) {
    clearTimeout(this.#silence);
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#show();
    this.streams.content?.finish();
    this.streams.reasoning.finish();
    this.caret.hidden = true;
    this.element.setAttribute("aria-busy", "false");
    if (this.node.reasoning) this.#showReasoning();
    if (this.#json && this.node.content) this.#showMark();
    this.#showCalls(this.sendResults !== null && this.node.status === "done");
    this.#showNotice(retry);
    fill(this.footer, makeFigures(this.node));
  }

  #showNotice(retry) {
    const { error, content, toolCalls, status } = this.node;
    const isEmpty = !content && !toolCalls?.length && status === "done";
    const text = error ?? (isEmpty ? "The answer is empty." : "");
    this.notice.hidden = !text && !retry;
    this.notice.classList.toggle("error", Boolean(error));
    fill(this.notice, text && h("p", { role: error ? "alert" : undefined, text }), retry);
  }

  /** Show the tokens in place of the text, or the text again. */
  toggleTokens() {
    this.#showsTokens = !this.#showsTokens;
    if (this.#showsTokens) fill(this.tokens, makeTokensView(this.node.tokens));
    this.tokens.hidden = !this.#showsTokens;
    this.content.hidden = this.#showsTokens;
    return this.#showsTokens;
  }

  close() {
    clearTimeout(this.#silence);
    cancelAnimationFrame(this.#frame);
  }
}
