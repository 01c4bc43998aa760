// Conversations in the browser's own database. Without one they last as long as the page.

import { MAX_CONVERSATION_CHARS, MAX_CONVERSATIONS } from "./limits.js";
import { Conversation } from "./tree.js";

const DATABASE = "penstock";
const TABLE = "conversations";

/** Says in words why a conversation could not be kept. */
export class StorageError extends Error {}

export class Storage {
  #database = null;
  #memory = new Map(); // used where there is no database

  /** Open the database; `isLasting` is false where the browser has none for this page. */
  async open() {
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      this.#database = await settle(request);
      this.#database.onversionchange = () => this.#database.close();
    } catch {
      this.#database = null;
    }
    return this;
  }

  get isLasting() {
    return this.#database !== null;
  }

  #table(mode) {
    return this.#database.transaction(TABLE, mode).objectStore(TABLE);
  }

  async #all() {
    return this.#database ? settle(this.#table("readonly").getAll()) : [...this.#memory.values()];
  }

  /** List {id, title, updated} of those whose title or text has `words`, the latest first. */
  async list(words = "") {
    const wanted = words.trim().toLowerCase();
    const found = [];
    for (const record of await this.#all()) {
      const title = new Conversation(record).shownTitle;
      const has = (text) => typeof text === "string" && text.toLowerCase().includes(wanted);
      if (!wanted || has(title) || record.nodes.some((node) => has(node.content)))
        found.push({ id: record.id, title, updated: record.updated });
    }
    return found.sort((one, other) => other.updated - one.updated);
  }

  async read(id) {
    const record = this.#database ? await settle(this.#table("readonly").get(id)) : this.#memory.get(id);
    return record ? new Conversation(record) : null;
  }

  async readAll() {
    return (await this.#all()).map((record) => new Conversation(record));
  }

  /** Keep a conversation; StorageError says why it cannot be. */
  async write(conversation) {
    const text = JSON.stringify(conversation);
    if (text.length > MAX_CONVERSATION_CHARS)
      throw new StorageError(`This conversation has ${mega(text.length)} MB, and ${mega(MAX_CONVERSATION_CHARS)} MB is the limit: what was added last is not kept. Export it, or begin a new one.`);
    if (!this.#database) return void this.#memory.set(conversation.id, JSON.parse(text));
    const num = await settle(this.#table("readonly").count());
    if (num >= MAX_CONVERSATIONS && !(await settle(this.#table("readonly").getKey(conversation.id))))
      throw new StorageError(`${num} conversations are kept, and that is the limit: delete some to keep this one.`);
    try {
      await this.#put(conversation);
    } catch (error) {
      if (error?.name !== "QuotaExceededError") throw new StorageError(`The browser did not keep this conversation: ${error?.message ?? error}`);
      throw new StorageError("The browser's storage for this page is full: export and delete conversations to keep this one.");
    }
  }

  /** Write a conversation with what another tab added to it. Settles when the transaction does: a full storage shows only then. */
  #put(conversation) {
    return new Promise((resolve, reject) => {
      const table = this.#table("readwrite");
      const { transaction } = table;
      table.get(conversation.id).onsuccess = ({ target }) => {
        if (target.result) conversation.adopt(target.result.nodes);
        table.put(JSON.parse(JSON.stringify(conversation)));
      };
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error ?? new Error("the write was aborted"));
    });
  }

  async delete(id) {
    if (this.#database) await settle(this.#table("readwrite").delete(id));
    else this.#memory.delete(id);
  }
}

function mega(num) {
  return (num / (1 << 20)).toFixed(1);
}

function settle(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds it"));
  });
}
