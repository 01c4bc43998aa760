// Blocks that hold text: paragraphs and headings, code, tables, and plain text once an answer has too many elements.

import { copyText } from "../clipboard.js";
import { fill, h, iconButton } from "../dom.js";
import { renderInline } from "./inline.js";

const SHORT_CHARS = 3000; // a text of this length is rendered at each frame
const GROWTH = 2; // a longer one when it has grown by this, so that all renderings together are linear
const MAX_CELLS = 64; // of a row

/** A paragraph, or a heading (`isOneLine`). */
export class TextLeaf {
  takesWholeLines = false;
  #lines = [];
  #last = []; // pieces of the last line
  #numChars = 0;
  #numShown = 0;
  #numFormatted = 0;
  #unshown = []; // pieces after what is shown

  constructor(tag, budget, isOneLine = false) {
    this.element = h(tag);
    this.budget = budget;
    this.isOneLine = isOneLine;
  }

  addLine(line) {
    if (this.#last.length) this.endLine();
    if (this.#lines.length) this.#note("\n");
    this.add(line.replace(/^ +/, ""));
  }

  add(text) {
    this.#last.push(text);
    this.#note(text);
  }

  #note(text) {
    this.#numChars += text.length;
    this.#unshown.push(text);
  }

  endLine() {
    if (!this.#last.length) return;
    const line = this.#last.join("");
    this.#lines.push(this.isOneLine ? line.trimEnd().replace(/(^|\s)#{1,20}$/, "") : line.trimEnd());
    this.#last = [];
  }

  peekLine() {
    return this.#lines.at(-1) ?? "";
  }

  dropLine() {
    this.#lines.pop();
    this.#numFormatted = 0;
    this.#numChars = this.#lines.length ? SHORT_CHARS : 0;
  }

  render() {
    if (this.#numShown === this.#numChars) return;
    if (this.#numChars <= SHORT_CHARS || this.#numChars >= GROWTH * this.#numFormatted) this.#format();
    else this.element.append(this.#unshown.join(""));
    this.#numShown = this.#numChars;
    this.#unshown = [];
  }

  #format() {
    const text = [...this.#lines, ...(this.#last.length ? [this.#last.join("")] : [])].join("\n");
    const left = this.budget.left;
    fill(this.element, renderInline(text, this.budget));
    this.cost = left - this.budget.left;
    this.budget.left = left; // charged when it is final
    this.#numFormatted = this.#numChars;
  }

  close() {
    this.endLine();
    if (!this.#lines.length) return this.element.remove();
    this.#format();
    this.budget.left -= this.cost;
  }
}

export class CodeLeaf {
  takesWholeLines = true;
  isOneLine = false;
  #text = document.createTextNode("");
  #pending = [];
  #isBegun = false;

  constructor(fence, info, indent, budget) {
    this.fence = fence;
    this.indent = indent;
    const language = info.split(/[\s{]/, 1)[0].slice(0, 40);
    const copy = iconButton("copy", "Copy this code", () => copyText(this.#text.data, copy));
    this.element = h("div", { class: "code" },
      h("div", { class: "code-head" }, h("span", { text: language }), copy),
      h("pre", { tabindex: "0", "aria-label": language ? `${language} code` : "code" }, h("code", {}, this.#text)));
    budget.left -= 8;
  }

  isEnd(line) {
    const bare = line.trim();
    return bare.length >= this.fence.length && bare[0] === this.fence[0] && /^(`+|~+)$/.test(bare) && /^ {0,3}\S/.test(line);
  }

  addLine(line) {
    const indent = Math.min(this.indent, /^ */.exec(line)[0].length);
    this.#pending.push((this.#isBegun ? "\n" : "") + line.slice(indent));
    this.#isBegun = true;
  }

  add(text) {
    this.#pending.push(text);
  }

  endLine() {}

  render() {
    if (this.#pending.length) this.#text.appendData(this.#pending.join(""));
    this.#pending = [];
  }

  close() {
    this.render();
  }
}

export class TableLeaf {
  takesWholeLines = true;
  isOneLine = false;

  constructor(head, aligns, budget) {
    this.aligns = aligns;
    this.budget = budget;
    this.body = h("tbody");
    this.element = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "table" },
      h("table", {}, h("thead", {}, this.#makeRow(head, "th")), this.body));
  }

  /** Make a table from its first two lines; null if their cells do not fit. */
  static begin(head, delimiters, budget) {
    const [cells, marks] = [splitCells(head), splitCells(delimiters)];
    if (cells.length !== marks.length || cells.length > MAX_CELLS) return null;
    const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : undefined));
    return new TableLeaf(cells, aligns, budget);
  }

  #makeRow(cells, tag) {
    this.budget.left -= 1 + this.aligns.length;
    return h("tr", {}, this.aligns.map((align, at) =>
      h(tag, { class: align }, renderInline(cells[at] ?? "", this.budget))));
  }

  addLine(line) {
    this.body.append(this.#makeRow(splitCells(line), "td"));
  }

  add() {} // the rest of a very long line of delimiters

  endLine() {}

  render() {}

  close() {}
}

function splitCells(line) {
  const cells = [];
  let cell = "";
  for (const part of line.trim().replace(/^\|/, "").split(/(\\.|\|)/s)) {
    if (part === "|") {
      cells.push(cell.trim());
      cell = "";
    } else cell += part === "\\|" ? "|" : part;
  }
  return cell.trim() || !cells.length ? [...cells, cell.trim()] : cells;
}

/** The rest of an answer with too many elements. */
export class PlainLeaf {
  takesWholeLines = false;
  isOneLine = false;
  #text = document.createTextNode("");
  #pending = [];

  constructor() {
    this.element = h("div", { class: "plain" }, this.#text);
  }

  addLine(line) {
    this.#pending.push(line);
  }

  add(text) {
    this.#pending.push(text);
  }

  endLine() {
    this.#pending.push("\n");
  }

  render() {
    if (this.#pending.length) this.#text.appendData(this.#pending.join(""));
    this.#pending = [];
  }

  close() {
    this.render();
  }
}
