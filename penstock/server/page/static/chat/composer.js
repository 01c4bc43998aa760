// The field to write in, and the button that sends or stops.

import { MAX_MESSAGE_CHARS } from "./limits.js";
import { fill, h, icon } from "../dom.js";

const MAX_HEIGHT = 0.4; // of the window
const isTouch = matchMedia("(pointer: coarse)").matches;

export class Composer {
  constructor(session) {
    this.session = session;
    this.field = h("textarea", {
      class: "composer-field", rows: "1", placeholder: "Write a message", "aria-label": "Message", enterkeyhint: isTouch ? "enter" : "send",
      on: { input: () => this.#fit(), keydown: (event) => this.#onKey(event), paste: (event) => this.#onPaste(event) },
    });
    this.button = h("button", { type: "button", class: "composer-button", on: { click: () => this.#press() } });
    this.element = h("div", { class: "composer" }, h("div", { class: "composer-box" }, this.field, this.button));
    this.update();
  }

  /** Go to the field; not on a phone, where its keyboard would cover the answer. */
  focus() {
    if (!isTouch) this.field.focus();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
    event.preventDefault();
    if (!this.session.isRunning()) this.#send();
  }

  /** Keep out what could not be sent: a field with it would stand still for seconds. */
  #onPaste(event) {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length > MAX_MESSAGE_CHARS && !this.session.canSend(text)) event.preventDefault();
  }

  #press() {
    if (this.session.isRunning()) this.session.stop();
    else this.#send();
    this.focus();
  }

  #send() {
    const text = this.field.value;
    if (!text.trim() || !this.session.models.length || !this.session.canSend(text)) return;
    this.field.value = "";
    this.#fit();
    this.session.send(text);
  }

  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, MAX_HEIGHT * innerHeight)}px`;
    this.update();
  }

  update() {
    const isRunning = this.session.isRunning();
    if (this.shown !== isRunning) fill(this.button, icon(isRunning ? "stop" : "send"));
    this.shown = isRunning;
    this.button.setAttribute("aria-label", isRunning ? "Stop" : "Send");
    this.button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
    this.button.disabled = !isRunning && (!this.field.value.trim() || !this.session.models.length);
    this.button.classList.toggle("stop", isRunning);
  }
}
