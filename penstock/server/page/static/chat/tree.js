// A conversation: a tree of messages. Answers made anew and edited messages are siblings; one child of each is shown.

import { VERSION } from "./limits.js";

export const CLOSED = "The page was closed while this was written.";
let numMade = 0;

export function makeId() {
  numMade += 1;
  const random = Array.from(crypto.getRandomValues(new Uint32Array(2)), (word) => word.toString(36)).join("");
  return `${Date.now().toString(36)}-${random}-${numMade}`;
}

export class Conversation {
  constructor({ id = makeId(), title = "", created = Date.now(), updated = created, settings = {}, nodes = [], shown = [] } = {}) {
    Object.assign(this, { id, title, created, updated, settings });
    this.nodes = new Map(nodes.map((node) => [node.id, node]));
    this.shown = new Map(shown); // parent's id, null at the top → the child on the path
    this.children = new Map();
    for (const node of nodes) this.#enter(node);
  }

  #enter(node) {
    const siblings = this.children.get(node.parent) ?? [];
    this.children.set(node.parent, siblings);
    siblings.push(node.id);
  }

  /** Add a message below `parent` (null at the top) and show it. */
  add(parent, fields) {
    const node = { id: makeId(), parent, created: Date.now(), ...fields };
    this.nodes.set(node.id, node);
    this.#enter(node);
    this.shown.set(parent, node.id);
    this.touch();
    return node;
  }

  /** Take over what another tab added to its copy: a list of messages, each after the one it answers.
   *
   * What both have stays as it is here, but for answers that were taken for lost while the other tab wrote them.
   */
  adopt(nodes) {
    for (const node of nodes) {
      const own = this.nodes.get(node.id);
      if (own && own.error === CLOSED && node.error !== CLOSED) Object.assign(own, { error: undefined }, node);
      if (own || (node.parent !== null && !this.nodes.has(node.parent))) continue;
      this.nodes.set(node.id, node);
      this.#enter(node);
      if (!this.shown.has(node.parent)) this.shown.set(node.parent, node.id);
    }
  }

  siblingsOf(node) {
    return this.children.get(node.parent);
  }

  /** Show the sibling `step` further. */
  turn(node, step) {
    const siblings = this.siblingsOf(node);
    const at = siblings.indexOf(node.id) + step;
    if (at < 0 || at >= siblings.length) return;
    this.shown.set(node.parent, siblings[at]);
  }

  /** Return the messages that are shown, from the first. */
  path() {
    const found = [];
    for (let id = this.shown.get(null); id !== undefined; id = this.shown.get(id)) found.push(this.nodes.get(id));
    return found;
  }

  /** Return the messages above a node and the node itself, whichever branch is shown. */
  pathTo(id) {
    const found = [];
    for (let at = id; at !== null; at = this.nodes.get(at).parent) found.push(this.nodes.get(at));
    return found.reverse();
  }

  touch() {
    this.updated = Date.now();
  }

  get isEmpty() {
    return this.nodes.size === 0;
  }

  get shownTitle() {
    return this.title || this.#firstWords() || "New conversation";
  }

  #firstWords() {
    const first = [...this.nodes.values()].find((node) => node.role === "user");
    const line = (first?.content ?? "").slice(0, 300).trim().split("\n", 1)[0];
    return line.length > 64 ? `${line.slice(0, 62).trimEnd()}…` : line;
  }

  toJSON() {
    const { id, title, created, updated, settings } = this;
    return { version: VERSION, id, title, created, updated, settings, nodes: [...this.nodes.values()], shown: [...this.shown] };
  }
}
