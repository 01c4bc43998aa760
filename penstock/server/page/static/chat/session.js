// What the chat knows and does, apart from its looks. It outlives the view: answers go on while another view is shown.

import { MAX_MESSAGE_CHARS } from "./limits.js";
import { readSettings } from "./params.js";
import { streamAnswer } from "./request.js";
import { Storage } from "./storage.js";
import { CLOSED, Conversation } from "./tree.js";

const SAVE_EVERY_MS = 3000;
const INHERITED = ["model", "temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "logprobs"];

export class Session extends EventTarget {
  models = [];
  modelsError = null;
  conversation = new Conversation();
  #running = new Map(); // conversation's id → {conversation, node, abort}
  #storageTold = "";

  constructor({ api, store, toast }) {
    super();
    Object.assign(this, { api, store, toast, storage: new Storage() });
  }

  async begin() {
    await this.storage.open();
    if (!this.storage.isLasting) this.toast("This browser keeps no data for this page: conversations last until it is closed.");
    this.create();
    await this.loadModels();
  }

  tell(kind, detail = {}) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }

  async loadModels() {
    try {
      const { data } = await this.api.get("v1/models");
      this.models = data.filter((model) => model.kind !== "embedding");
      this.modelsError = null;
    } catch (error) {
      this.modelsError = error;
    }
    this.tell("models");
  }

  get model() {
    const wanted = this.conversation.settings.model;
    return this.models.find((one) => one.id === wanted) ?? this.models[0] ?? null;
  }

  // conversations

  create() {
    const given = this.store.get("chat.settings", {});
    const settings = readSettings(Object.fromEntries(INHERITED.map((name) => [name, given?.[name]])));
    this.#show(new Conversation({ settings }));
  }

  #show(conversation) {
    this.conversation = conversation;
    this.tell("conversation");
  }

  async select(id) {
    if (id === this.conversation.id) return;
    const found = this.#running.get(id)?.conversation ?? (await this.storage.read(id));
    if (!found) return this.toast("That conversation is gone: another tab may have deleted it.", "error");
    this.#show(this.#mend(found));
  }

  /** Mark what was being written when the page was closed. */
  #mend(conversation) {
    const writing = this.#running.get(conversation.id)?.node;
    for (const node of conversation.nodes.values())
      if (node.status === "writing" && node !== writing) Object.assign(node, { status: "broken", error: CLOSED });
    return conversation;
  }

  async rename(id, title) {
    const found = id === this.conversation.id ? this.conversation : await this.storage.read(id);
    if (!found) return;
    found.title = title.trim();
    await this.save(found);
    this.tell("conversation-name");
  }

  async remove(id) {
    this.#running.get(id)?.abort.abort();
    this.#running.delete(id);
    await this.storage.delete(id);
    if (id === this.conversation.id) this.create();
    this.tell("list");
  }

  async adopt(conversations) {
    for (const one of conversations) await this.save(one, true);
    if (conversations.length) this.#show(conversations.at(-1));
    this.tell("list");
  }

  /** Keep a conversation; a failure is told once. With `throws`, it is thrown. */
  async save(conversation, throws = false) {
    const num = conversation.nodes.size;
    try {
      await this.storage.write(conversation);
      if (conversation.nodes.size > num && conversation === this.conversation) this.tell("conversation");
      this.#storageTold = "";
      this.tell("list");
    } catch (error) {
      if (throws) throw error;
      if (error.message !== this.#storageTold) this.toast(error.message, "error");
      this.#storageTold = error.message;
    }
  }

  set(name, value) {
    const { settings } = this.conversation;
    if (value === undefined || value === "") delete settings[name];
    else settings[name] = value;
    if (INHERITED.includes(name)) this.store.set("chat.settings", Object.fromEntries(INHERITED.map((one) => [one, settings[one]])));
    if (!this.conversation.isEmpty) this.save(this.conversation);
    this.tell("settings", { name });
  }

  // messages

  isRunning(conversation = this.conversation) {
    return this.#running.has(conversation.id);
  }

  isWriting(node) {
    return [...this.#running.values()].some((one) => one.node === node);
  }

  /** True if a message may be sent; else the user is told why not. */
  canSend(text) {
    if (text.length > MAX_MESSAGE_CHARS)
      this.toast(`This message has ${text.length.toLocaleString("en")} characters, and ${MAX_MESSAGE_CHARS.toLocaleString("en")} is the limit: send a part of it.`, "error");
    return text.length <= MAX_MESSAGE_CHARS && this.#isFree();
  }

  /** True if no answer is being written here; else the user is told. */
  #isFree() {
    if (this.isRunning()) this.toast("An answer is being written in this conversation: stop it first.");
    return !this.isRunning();
  }

  send(text) {
    const path = this.conversation.path();
    const node = this.conversation.add(path.at(-1)?.id ?? null, { role: "user", content: text });
    this.#answer(node.id);
  }

  /** Put another text in place of a user's message, as a branch of its own, and answer it. */
  edit(node, text) {
    if (!this.canSend(text)) return;
    const made = this.conversation.add(node.parent, { role: "user", content: text });
    this.#answer(made.id);
  }

  /** Put another text in place of an answer, as a branch of its own. */
  editAnswer(node, text) {
    const { role, reasoning, toolCalls, model } = node;
    this.conversation.add(node.parent, { role, content: text, reasoning, toolCalls, model, status: "done", finish: "edited" });
    this.save(this.conversation);
    this.tell("conversation");
  }

  sendResults(node, results) {
    if (!this.#isFree()) return;
    const made = this.conversation.add(node.id, { role: "tool", content: "", results });
    this.#answer(made.id);
  }

  regenerate(node) {
    if (this.#isFree()) this.#answer(node.parent);
  }

  continueAnswer(node) {
    if (this.#isFree()) this.#run(this.conversation, node, true);
  }

  turn(node, step) {
    this.conversation.turn(node, step);
    this.save(this.conversation);
    this.tell("conversation");
  }

  stop(conversation = this.conversation) {
    this.#running.get(conversation.id)?.abort.abort();
  }

  #answer(parent) {
    const node = this.conversation.add(parent, { role: "assistant", content: "", model: this.model?.id, status: "writing" });
    this.#run(this.conversation, node, false);
  }

  async #run(conversation, node, goesOn) {
    const abort = new AbortController();
    const run = { conversation, node, abort, savedMs: Date.now() };
    this.#running.set(conversation.id, run);
    Object.assign(node, { status: "writing", error: undefined, form: conversation.settings.form, schema: conversation.settings.schema });
    this.tell("conversation");
    this.tell("running", { node });
    this.save(conversation);
    try {
      const settings = { ...conversation.settings };
      await streamAnswer(this.api, node, {
        nodes: conversation.pathTo(node.id).slice(0, -1), settings, model: node.model ?? this.model?.id, goesOn, signal: abort.signal,
        changed: (kind, text) => this.#noteChange(run, kind, text),
      });
      node.status = "done";
    } catch (error) {
      this.#noteFailure(node, error);
    } finally {
      if (this.#running.get(conversation.id) === run) {
        this.#running.delete(conversation.id);
        conversation.touch();
        this.save(conversation);
      }
      this.tell("ended", { node });
      this.tell("running", { node });
    }
  }

  #noteChange(run, kind, text) {
    this.tell("piece", { node: run.node, kind, text });
    if (Date.now() - run.savedMs > SAVE_EVERY_MS) {
      run.savedMs = Date.now();
      this.save(run.conversation);
    }
  }

  #noteFailure(node, error) {
    if (error.name === "AbortError") return Object.assign(node, { status: "stopped" });
    const isBroken = error.code === "broken_stream" || (error.status === 0 && node.content !== "");
    const later = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
    return Object.assign(node, { status: isBroken ? "broken" : "failed", error: error.message + later });
  }
}
