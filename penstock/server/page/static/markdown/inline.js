// Renders the text of one block: emphasis, code, links. Makes text nodes and elements only; linear in the text.

import { h } from "../dom.js";

const PLAIN = /[^\\`*_~[\]!<\n]+/y;
const RUN = /`+|\*+|_+|~+/y;
const URL_TEXT = /https?:\/\/[^\s<>"'`*]{1,2000}/y;
const BREAK = /<br\s{0,9}\/?>/iy;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/iy;
const PUNCTUATION = /[\s!-/:-@[-`{-~\u2000-\u206f\u3000-\u303f\uff00-\uff0f]/;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SAFE = new Set(["http:", "https:", "mailto:"]);
const MAX_OPEN = 16;
const MAX_URL_CHARS = 2000;
const MAX_PARENS = 8;
const ELEMENTS = { "*": ["em", "strong"], "_": ["em", "strong"], "~": [null, "del"] };

/** Return the nodes of a text. `budget.left` bounds the elements of the whole answer; beyond it all is text. */
export function renderInline(text, budget) {
  return new Inline(text, budget).run();
}

/** Return the address if a link may lead there, else null. */
export function checkUrl(address) {
  try {
    const url = new URL(address);
    return SAFE.has(url.protocol) ? url.href : null;
  } catch {
    return null; // relative addresses too: they would lead into this server
  }
}

class Inline {
  #at = 0;
  #plain = [];
  #frames = [{ kind: "", marker: "", nodes: [] }];
  #numOpen = new Map(); // kind → how many frames
  #codeEnds = null; // length of a run of backticks → their positions, from the last
  #nextUrl = -2;

  constructor(text, budget) {
    this.text = text;
    this.budget = budget;
  }

  run() {
    if (this.budget.left <= 0) return [document.createTextNode(this.text)];
    while (this.#at < this.text.length) this.#step();
    while (this.#frames.length > 1) this.#unwind();
    this.#flush();
    return this.#frames[0].nodes;
  }

  #step() {
    if (this.budget.left <= 0) return this.#take(this.text.slice(this.#at));
    const char = this.text[this.#at];
    if (char === "\\") return this.#escape();
    if (char === "\n") return this.#breakLine(1);
    if (char === "`") return this.#code();
    if (char === "*" || char === "_" || char === "~") return this.#emphasis(char);
    if (char === "!" && this.text[this.#at + 1] === "[") return this.#open("[", "![", 2);
    if (char === "[") return this.#open("[", "[", 1);
    if (char === "]") return this.#closeLink();
    if (char === "<") return this.#angle();
    if (char === "!") return this.#take(char);
    return this.#text();
  }

  #text() {
    PLAIN.lastIndex = this.#at;
    const found = PLAIN.exec(this.text)[0];
    const end = this.#at + found.length;
    if (this.#nextUrl !== -1 && this.#nextUrl < this.#at) this.#nextUrl = this.text.indexOf("http", this.#at);
    const url = this.#nextUrl;
    if (url < 0 || url >= end || this.#numOpen.get("[") > 0) return this.#take(found);
    this.#take(this.text.slice(this.#at, url));
    this.#bareUrl();
  }

  #bareUrl() {
    URL_TEXT.lastIndex = this.#at;
    let found = URL_TEXT.exec(this.text)?.[0] ?? "";
    found = found.replace(/[.,;:!?\])]{1,20}$/, (tail) => (tail[0] === ")" && found.includes("(") ? ")" : ""));
    const href = found && checkUrl(found);
    if (!href) return this.#take("http");
    this.#at += found.length;
    this.#add(makeLink(href, [document.createTextNode(found)]));
  }

  #take(text) {
    this.#plain.push(text);
    this.#at += text.length;
  }

  #flush() {
    if (!this.#plain.length) return;
    this.#frames.at(-1).nodes.push(document.createTextNode(this.#plain.join("")));
    this.#plain = [];
  }

  #add(node) {
    this.#flush();
    this.budget.left -= 1;
    this.#frames.at(-1).nodes.push(node);
  }

  #escape() {
    const next = this.text[this.#at + 1];
    if (next === "\n") return this.#breakLine(2);
    if (next !== undefined && ESCAPABLE.test(next)) {
      this.#plain.push(next);
      this.#at += 2;
    } else this.#take("\\");
  }

  #breakLine(length) {
    this.#at += length;
    this.#add(h("br"));
  }

  #angle() {
    BREAK.lastIndex = ANGLE_LINK.lastIndex = this.#at;
    const isBreak = BREAK.exec(this.text);
    if (isBreak) return this.#breakLine(isBreak[0].length);
    const link = ANGLE_LINK.exec(this.text);
    const href = link && checkUrl(link[1]);
    if (!href) return this.#take("<");
    this.#at += link[0].length;
    this.#add(makeLink(href, [document.createTextNode(link[1])]));
  }

  #code() {
    RUN.lastIndex = this.#at;
    const run = RUN.exec(this.text)[0];
    const begin = this.#at + run.length;
    const end = this.#findCodeEnd(run.length, begin);
    if (end < 0) return this.#take(run);
    const inside = this.text.slice(begin, end).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    this.#at = end + run.length;
    this.#add(h("code", { text: padded ? inside.slice(1, -1) : inside }));
  }

  #findCodeEnd(length, from) {
    if (this.#codeEnds === null) {
      this.#codeEnds = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        const ends = this.#codeEnds.get(run[0].length) ?? [];
        this.#codeEnds.set(run[0].length, ends);
        ends.push(run.index);
      }
      for (const ends of this.#codeEnds.values()) ends.reverse();
    }
    const ends = this.#codeEnds.get(length) ?? [];
    while (ends.length && ends.at(-1) < from) ends.pop();
    return ends.at(-1) ?? -1;
  }

  #emphasis(char) {
    RUN.lastIndex = this.#at;
    const run = RUN.exec(this.text)[0];
    const before = this.text[this.#at - 1] ?? " ";
    const after = this.text[this.#at + run.length] ?? " ";
    const isWord = char === "_" && !PUNCTUATION.test(before) && !PUNCTUATION.test(after);
    let left = run.length > 3 ? 0 : run.length;
    if (isWord || !left || (char === "~" && left !== 2)) return this.#take(run);
    if (!/\s/.test(before)) left = this.#closeAll(char, left);
    if (left && !/\s/.test(after) && left !== 3) this.#open(char + left, char.repeat(left), left);
    else if (left === 3 && !/\s/.test(after)) {
      this.#open(`${char}2`, char.repeat(2), 2);
      this.#open(`${char}1`, char, 1);
    } else this.#take(char.repeat(left));
  }

  /** Close what a run of `left` characters can; returns how many of them remain. */
  #closeAll(char, left) {
    for (let size = Math.min(2, left); size && left; size = Math.min(size, left)) {
      const kind = char + size;
      const other = size === 2 && left === 3 && this.#frames.at(-1).kind === `${char}1` ? 1 : 0;
      if (other) {
        this.#close(`${char}1`, "em", 1);
        left -= 1;
      } else if (this.#numOpen.get(kind) > 0) {
        this.#close(kind, ELEMENTS[char][size - 1], size);
        left -= size;
      } else size -= 1;
    }
    return left;
  }

  #close(kind, tag, length) {
    while (this.#frames.at(-1).kind !== kind) this.#unwind();
    const nodes = this.#pop().nodes;
    this.#at += length;
    this.#add(h(tag, {}, nodes));
  }

  #open(kind, marker, length) {
    if (this.#frames.length > MAX_OPEN || this.budget.left <= 0) return this.#take(marker);
    this.#flush();
    this.#frames.push({ kind, marker, nodes: [] });
    this.#numOpen.set(kind, (this.#numOpen.get(kind) ?? 0) + 1);
    this.#at += length;
  }

  #pop() {
    this.#flush();
    const frame = this.#frames.pop();
    this.#numOpen.set(frame.kind, this.#numOpen.get(frame.kind) - 1);
    return frame;
  }

  /** Give up the innermost frame: its marker was only text. */
  #unwind() {
    const frame = this.#pop();
    const nodes = this.#frames.at(-1).nodes;
    nodes.push(document.createTextNode(frame.marker));
    for (const node of frame.nodes) nodes.push(node);
  }

  #closeLink() {
    if (!(this.#numOpen.get("[") > 0)) return this.#take("]");
    while (this.#frames.at(-1).kind !== "[") this.#unwind();
    const frame = this.#frames.at(-1);
    const target = frame.isDead ? null : this.#readTarget(this.#at + 1);
    const href = target && checkUrl(target.address);
    if (!href) {
      this.#unwind();
      return this.#take("]");
    }
    this.#pop();
    this.#at = target.end;
    const isImage = frame.marker === "![";
    const nodes = frame.nodes.length ? frame.nodes : [document.createTextNode(isImage ? "image" : target.address)];
    this.#add(makeLink(href, nodes, isImage));
    for (const outer of this.#frames) outer.isDead = outer.kind === "["; // no link within a link
  }

  /** Read "(address "title")" from `at`. */
  #readTarget(at) {
    if (this.text[at] !== "(") return null;
    let depth = 0;
    const limit = Math.min(this.text.length, at + MAX_URL_CHARS);
    for (let end = at; end < limit; end++) {
      const char = this.text[end];
      if (char === "\n") return null;
      if (char === "(" && ++depth > MAX_PARENS) return null;
      if (char === ")" && --depth === 0) {
        const inside = this.text.slice(at + 1, end).trim();
        return { address: inside.split(/\s/, 1)[0].replace(/^<|>$/g, ""), end: end + 1 };
      }
    }
    return null;
  }
}

function makeLink(href, nodes, isImage = false) {
  const title = isImage ? `A picture that is not loaded: ${href}` : href;
  return h("a", { href, title, rel: "noopener noreferrer nofollow", target: "_blank", class: isImage ? "picture" : undefined }, nodes);
}
