// Checks JSON as it arrives, and a whole value against a schema. The schema's common keywords are checked;
// others are the server's to enforce.

const TYPES = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  number: (value) => typeof value === "number",
  integer: (value) => Number.isInteger(value),
  string: (value) => typeof value === "string",
  array: Array.isArray,
  object: isObject,
};
const MAX_DEPTH = 200;
const MAX_REFS = 50; // followed one after another
const STATES = { value: 0, firstItem: 1, afterValue: 2, firstKey: 3, key: 4, colon: 5, text: 6, escape: 7, hex: 8, word: 9, done: 10 };
const WORD = /^(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)$/;
const WORD_BEGIN = /^(?:t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?|-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:[eE][+-]?\d*)?)?)$/;
const MAX_WORD_CHARS = 400;

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** Reads JSON piece by piece. `state` is "begun", "whole" or "broken"; `numChars` tells where it broke. */
export class JsonCheck {
  #state = STATES.value;
  #stack = []; // "{" or "["
  #isKey = false;
  #word = "";
  #hex = 0;
  numChars = 0;
  isBroken = false;

  push(text) {
    for (const char of text) {
      if (this.isBroken) return;
      this.#take(char);
      if (!this.isBroken) this.numChars += char.length;
    }
  }

  get state() {
    if (this.isBroken) return "broken";
    const isWord = this.#state === STATES.word && !this.#stack.length && WORD.test(this.#word);
    return this.#state === STATES.done || isWord ? "whole" : "begun";
  }

  #take(char) {
    const state = this.#state;
    if (state === STATES.text) return this.#takeText(char);
    if (state === STATES.escape) return this.#takeEscape(char);
    if (state === STATES.hex) return this.#takeHex(char);
    if (state === STATES.word && !/[\s,\]}]/.test(char)) return this.#takeWord(char);
    if (state === STATES.word && !this.#endWord()) return;
    if (char === " " || char === "\n" || char === "\t" || char === "\r") return;
    this.#takeMark(char);
  }

  #takeText(char) {
    if (char === "\\") this.#state = STATES.escape;
    else if (char === '"') this.#endText();
    else if (char < " ") this.isBroken = true;
  }

  #endText() {
    if (this.#isKey) this.#state = STATES.colon;
    else this.#endValue();
  }

  #takeEscape(char) {
    if (char === "u") [this.#state, this.#hex] = [STATES.hex, 4];
    else if ('"\\/bfnrt'.includes(char)) this.#state = STATES.text;
    else this.isBroken = true;
  }

  #takeHex(char) {
    if (!/[0-9a-fA-F]/.test(char)) this.isBroken = true;
    else if (--this.#hex === 0) this.#state = STATES.text;
  }

  #takeWord(char) {
    this.#word += char;
    if (this.#word.length > MAX_WORD_CHARS || !WORD_BEGIN.test(this.#word)) this.isBroken = true;
  }

  #endWord() {
    if (WORD.test(this.#word)) this.#endValue();
    else this.isBroken = true;
    return !this.isBroken;
  }

  #endValue() {
    this.#state = this.#stack.length ? STATES.afterValue : STATES.done;
  }

  #takeMark(char) {
    const state = this.#state;
    const top = this.#stack.at(-1);
    if (state === STATES.colon && char === ":") this.#state = STATES.value;
    else if ((state === STATES.firstKey || state === STATES.key) && char === '"') [this.#state, this.#isKey] = [STATES.text, true];
    else if (state === STATES.firstKey && char === "}") this.#pop();
    else if (state === STATES.firstItem && char === "]") this.#pop();
    else if (state === STATES.afterValue && char === ",") this.#state = top === "{" ? STATES.key : STATES.value;
    else if (state === STATES.afterValue && char === (top === "{" ? "}" : "]")) this.#pop();
    else if (state === STATES.value || state === STATES.firstItem) this.#beginValue(char);
    else this.isBroken = true;
  }

  #pop() {
    this.#stack.pop();
    this.#endValue();
  }

  #beginValue(char) {
    if (char === "{" || char === "[") {
      this.#stack.push(char);
      this.#state = char === "{" ? STATES.firstKey : STATES.firstItem;
    } else if (char === '"') [this.#state, this.#isKey] = [STATES.text, false];
    else {
      this.#word = "";
      this.#state = STATES.word;
      this.#takeWord(char);
    }
  }
}

/** Return what a value has against a schema, in words; null if nothing. */
export function checkValue(value, schema, path = "$", root = schema, depth = 0) {
  if (depth > MAX_DEPTH || schema === true || schema === undefined) return null;
  if (schema === false) return `${path} is not allowed`;
  const own = follow(schema, root);
  if (own === null) return null;
  const again = (part, inner, at) => checkValue(part, inner, at, root, depth + 1);
  return checkKind(value, own, path) ?? checkParts(value, own, path, again) ?? checkChoices(value, own, path, again);
}

function follow(schema, root) {
  let found = schema;
  for (let num = 0; num < MAX_REFS && typeof found?.$ref === "string"; num++) {
    if (!found.$ref.startsWith("#")) return null;
    const names = found.$ref.slice(1).split("/").filter(Boolean).map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
    found = names.reduce((part, name) => (isObject(part) && Object.hasOwn(part, name) ? part[name] : undefined), root);
  }
  return isObject(found) && found.$ref === undefined ? found : null;
}

function checkKind(value, schema, path) {
  const types = schema.type === undefined ? [] : [schema.type].flat();
  if (types.length && !types.some((type) => TYPES[type]?.(value))) return `${path} must be ${types.join(" or ")}`;
  if (Array.isArray(schema.enum) && !schema.enum.some((one) => isSame(one, value))) return `${path} must be one of ${JSON.stringify(schema.enum).slice(0, 80)}`;
  if (schema.const !== undefined && !isSame(schema.const, value)) return `${path} must be ${JSON.stringify(schema.const).slice(0, 80)}`;
  if (typeof value === "number") {
    if (value < schema.minimum || value <= schema.exclusiveMinimum) return `${path} is too small`;
    if (value > schema.maximum || value >= schema.exclusiveMaximum) return `${path} is too large`;
  }
  const size = typeof value === "string" ? [...value].length : Array.isArray(value) ? value.length : null;
  const [least, most] = typeof value === "string" ? [schema.minLength, schema.maxLength] : [schema.minItems, schema.maxItems];
  if (size !== null && size < least) return `${path} is too short`;
  if (size !== null && size > most) return `${path} is too long`;
  return null;
}

function isSame(one, other) {
  return one === other || (typeof one === "object" && JSON.stringify(one) === JSON.stringify(other));
}

function checkParts(value, schema, path, again) {
  if (Array.isArray(value)) {
    const first = Array.isArray(schema.prefixItems) ? schema.prefixItems : [];
    return findFirst(value, (part, at) => again(part, first[at] ?? schema.items, `${path}[${at}]`));
  }
  if (!isObject(value)) return null;
  const missing = (Array.isArray(schema.required) ? schema.required : []).find((name) => !Object.hasOwn(value, name));
  if (missing !== undefined) return `${path} has no ${JSON.stringify(missing)}`;
  const properties = isObject(schema.properties) ? schema.properties : {};
  return findFirst(Object.keys(value), (name) => {
    const at = /^[A-Za-z_]\w*$/.test(name) ? `${path}.${name}` : `${path}[${JSON.stringify(name)}]`;
    if (Object.hasOwn(properties, name)) return again(value[name], properties[name], at);
    return isObject(schema.patternProperties) ? null : again(value[name], schema.additionalProperties, at);
  });
}

function checkChoices(value, schema, path, again) {
  if (Array.isArray(schema.allOf)) {
    const found = findFirst(schema.allOf, (one) => again(value, one, path));
    if (found) return found;
  }
  for (const choices of [schema.anyOf, schema.oneOf]) {
    if (Array.isArray(choices) && choices.length && choices.every((one) => again(value, one, path) !== null)) return `${path} fits none of its choices`;
  }
  return null;
}

function findFirst(values, check) {
  for (let at = 0; at < values.length; at++) {
    const found = check(values[at], at);
    if (found) return found;
  }
  return null;
}
