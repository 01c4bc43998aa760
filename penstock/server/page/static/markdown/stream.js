// Renders markdown as it arrives. A block is final once the next begins; each character is looked at a bounded number
// of times, whatever the text.

import { CodeLeaf, PlainLeaf, TableLeaf, TextLeaf } from "./leaves.js";
import { h } from "../dom.js";

const MAX_DEPTH = 12; // containers within each other; deeper markers are text
const MAX_ELEMENTS = 20_000; // of an answer; what follows is shown as plain text
const MAX_UNDECIDED_CHARS = 200;
const UNDECIDED = /^[\s>#*_+\-=|:`~\d.)]*$/; // could still become any kind of line
const FENCE = /^ {0,3}(`{3,200}|~{3,200})\s*([^\n`]{0,200})$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]{0,20}\1){2,100}[ \t]{0,20}$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const BULLET = /^( {0,3})([-*+])( {1,4}(?=\S)| {0,4}$|\t)/;
const NUMBER = /^( {0,3})(\d{1,9})([.)])( {1,4}(?=\S)| {0,4}$|\t)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*){0,100}\|?[ \t]*$/;

export class MarkdownStream {
  #root;
  #stack; // open containers: {kind, element, indent}
  #leaf = null;
  #line = []; // pieces of a line that is not decided
  #numLineChars = 0;
  #waitsForEnd = false; // the line is looked at once it has ended
  #isMidLine = false; // the line is decided: what follows belongs to the leaf
  #afterBlank = false;

  constructor(root) {
    this.#root = root;
    this.budget = { left: MAX_ELEMENTS };
    this.#stack = [{ kind: "root", element: root }];
  }

  push(text) {
    let begin = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", begin)) {
      this.#add(text.slice(begin, end));
      this.#endLine();
      begin = end + 1;
    }
    if (begin < text.length) {
      this.#add(text.slice(begin));
      this.#tryLine();
    }
  }

  /** Show what was pushed. */
  flush() {
    this.#leaf?.render();
  }

  /** The text has ended. */
  finish() {
    if (this.#numLineChars && !this.#isMidLine) this.#endLine();
    this.#closeLeaf();
  }

  #add(text) {
    if (this.#isMidLine) return this.#leaf.add(text);
    if (text) this.#line.push(text);
    this.#numLineChars += text.length;
  }

  /** Decide what kind the line is, as soon as that is certain. */
  #tryLine() {
    if (this.#isMidLine || this.#waitsForEnd) return;
    const line = this.#line.join("");
    this.#line = [line];
    if (line.length < MAX_UNDECIDED_CHARS && UNDECIDED.test(line)) return;
    const bare = line.replace(/^[\s>*+\-\d.)]{0,60}/, "");
    if (/^(?:[|]|`{3}|~{3})/.test(bare) || this.#leaf?.takesWholeLines) {
      this.#waitsForEnd = true;
      return;
    }
    this.#takeLine(line);
    this.#isMidLine = true;
    if (this.#leaf === null) this.#open(new TextLeaf("p", this.budget));
    this.#line = [];
  }

  #endLine() {
    if (this.#isMidLine) this.#leaf?.endLine();
    else {
      this.#takeLine(this.#line.join(""));
      this.#leaf?.endLine();
    }
    this.#line = [];
    this.#numLineChars = 0;
    this.#isMidLine = this.#waitsForEnd = false;
    if (this.#leaf?.isOneLine) this.#closeLeaf();
  }

  #takeLine(given) {
    if (this.budget.left <= 0) return this.#takePlain(given);
    let line = given.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
    const isBlank = line.trim() === "";
    let numMatched = 1;
    for (; numMatched < this.#stack.length; numMatched++) {
      const rest = this.#stack[numMatched].match(line, isBlank);
      if (rest === null) break;
      line = rest;
    }
    const isWhole = numMatched === this.#stack.length;
    if (isWhole && this.#leaf instanceof CodeLeaf) return this.#takeCode(line);
    if (isBlank) return this.#takeBlank(numMatched);
    if (!isWhole && this.#isLazy(line)) return this.#leaf.addLine(line);
    if (!isWhole) this.#closeContainers(numMatched);
    this.#takeBlock(this.#openContainers(line));
    this.#afterBlank = false;
  }

  #isLazy(line) {
    return this.#leaf instanceof TextLeaf && !this.#afterBlank && !startsBlock(line);
  }

  #takePlain(line) {
    if (!(this.#leaf instanceof PlainLeaf)) {
      this.#closeContainers(1);
      this.#open(new PlainLeaf());
    }
    this.#leaf.addLine(line);
  }

  #takeBlank(numMatched) {
    const quote = this.#stack.findIndex((one, at) => at >= numMatched && one.kind === "quote");
    if (quote >= 0) this.#closeContainers(quote);
    this.#closeLeaf();
    this.#afterBlank = true;
  }

  #takeCode(line) {
    if (this.#leaf.isEnd(line)) this.#closeLeaf();
    else this.#leaf.addLine(line);
  }

  #openContainers(given) {
    let line = given;
    while (this.#stack.length <= MAX_DEPTH) {
      if (RULE.test(line)) break;
      const quote = QUOTE.exec(line);
      const item = quote ? null : BULLET.exec(line) ?? NUMBER.exec(line);
      if (!quote && !item) break;
      if (item && this.#leaf instanceof TextLeaf && item[4] !== undefined && item[2] !== "1") {
        if (this.#stack.at(-1).kind !== "item" && !this.#afterBlank) break; // "2024. was" goes on in a paragraph
      }
      this.#closeLeaf();
      if (quote) this.#openQuote();
      else this.#openItem(item);
      line = line.slice((quote ?? item)[0].length);
    }
    const top = this.#stack.at(-1);
    if (top.kind === "list") this.#stack.pop(); // the list has ended
    return line;
  }

  #openQuote() {
    this.#endList();
    this.#push("quote", h("blockquote"), (line, isBlank) => {
      const found = isBlank ? null : QUOTE.exec(line);
      return found ? line.slice(found[0].length) : null;
    });
  }

  #openItem(item) {
    const isNumber = item[4] !== undefined;
    const mark = isNumber ? item[3] : item[2];
    const list = this.#stack.at(-1);
    if (list.kind !== "list" || list.mark !== mark) {
      this.#endList();
      const start = isNumber && item[2] !== "1" ? Number(item[2]) : undefined;
      this.#push("list", h(isNumber ? "ol" : "ul", { start }), (line) => line).mark = mark;
    }
    const indent = item[0].trimEnd() === item[0] ? item[0].length + 1 : item[0].length;
    this.#push("item", h("li"), (line, isBlank) => {
      if (isBlank) return "";
      const space = /^ */.exec(line)[0].length;
      return space >= 2 ? line.slice(Math.min(space, indent)) : null;
    });
  }

  #endList() {
    if (this.#stack.at(-1).kind === "list") this.#stack.pop();
  }

  #push(kind, element, match) {
    this.budget.left -= 1;
    this.#stack.at(-1).element.append(element);
    const container = { kind, element, match };
    this.#stack.push(container);
    return container;
  }

  #closeContainers(numKept) {
    this.#closeLeaf();
    this.#stack.length = Math.max(1, numKept);
  }

  #takeBlock(line) {
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) return this.#open(new CodeLeaf(fence[1], fence[2].trim(), /^ */.exec(line)[0].length, this.budget));
    if (RULE.test(line)) return this.#addRule();
    if (heading) {
      this.#open(new TextLeaf(`h${heading[1].length}`, this.budget, true));
      return this.#leaf.addLine(line.slice(heading[0].length));
    }
    if (line.trim() === "") return this.#closeLeaf();
    if (this.#leaf instanceof TableLeaf && line.includes("|")) return this.#leaf.addLine(line);
    if (this.#leaf instanceof TextLeaf && line.length < 2000 && DELIMITERS.test(line) && this.#startTable(line)) return;
    if (!(this.#leaf instanceof TextLeaf)) this.#open(new TextLeaf("p", this.budget));
    this.#leaf.addLine(line);
  }

  #addRule() {
    this.#closeLeaf();
    this.budget.left -= 1;
    this.#stack.at(-1).element.append(h("hr"));
  }

  /** Make the paragraph's last line the head of a table, if its cells fit the delimiters. */
  #startTable(delimiters) {
    const head = this.#leaf.peekLine();
    const table = head.includes("|") ? TableLeaf.begin(head, delimiters, this.budget) : null;
    if (table === null) return false;
    this.#leaf.dropLine();
    this.#open(table);
    return true;
  }

  #open(leaf) {
    this.#closeLeaf();
    this.budget.left -= 1;
    this.#leaf = leaf;
    this.#stack.at(-1).element.append(leaf.element);
  }

  #closeLeaf() {
    this.#leaf?.close();
    this.#leaf = null;
  }
}

function startsBlock(line) {
  return FENCE.test(line) || RULE.test(line) || HEADING.test(line) || BULLET.test(line) || NUMBER.test(line) || QUOTE.test(line);
}

/** Render a whole text. */
export function renderMarkdown(root, text) {
  const stream = new MarkdownStream(root);
  stream.push(text);
  stream.finish();
}
