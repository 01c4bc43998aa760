// Export and import of conversations as JSON. What is imported is checked and copied field by field.

import { MAX_CONVERSATIONS, MAX_IMPORT_BYTES, MAX_KEPT_TOKENS, MAX_NODES, MAX_TEXT_CHARS, MAX_TITLE_CHARS, VERSION } from "./limits.js";
import { FORMS, readSettings } from "./params.js";
import { Conversation, makeId } from "./tree.js";
import { h } from "../dom.js";

const FORMAT = "penstock-conversations";
const ROLES = ["user", "assistant", "tool"];
const STATES = ["done", "stopped", "broken", "failed"]; // not "writing": nobody does

export function exportConversations(conversations, name) {
  const text = JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = h("a", { href: url, download: `${name}.json` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Let the user choose a file; resolves with its conversations, or null if none was chosen. */
export function chooseFile() {
  const input = h("input", { type: "file", accept: "application/json,.json", class: "offscreen" });
  document.body.append(input);
  return new Promise((resolve, reject) => {
    input.addEventListener("cancel", () => resolve(null));
    input.addEventListener("change", () => (input.files[0] ? readFile(input.files[0]).then(resolve, reject) : resolve(null)));
    input.click();
  }).finally(() => input.remove());
}

async function readFile(file) {
  if (file.size > MAX_IMPORT_BYTES) fail(`it has ${file.size} bytes, and ${MAX_IMPORT_BYTES} is the limit`);
  return readExport(await file.text());
}

/** Read an export; each conversation gets a new id, so that none is replaced. */
export function readExport(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    fail(`it is not JSON (${error.message})`);
  }
  if (value?.format !== FORMAT) fail(`its "format" is not "${FORMAT}"`);
  if (value.version !== VERSION) fail(`its version is ${JSON.stringify(value.version)?.slice(0, 20)}, and this page reads ${VERSION}`);
  if (!Array.isArray(value.conversations)) fail('"conversations" is not a list');
  if (value.conversations.length > MAX_CONVERSATIONS) fail(`it has ${value.conversations.length} conversations, and ${MAX_CONVERSATIONS} is the limit`);
  return value.conversations.map((one, at) => readConversation(one, `conversation ${at + 1}`));
}

function fail(why) {
  throw new Error(`This file cannot be imported: ${why}.`);
}

function readConversation(given, where) {
  if (given === null || typeof given !== "object" || !Array.isArray(given.nodes)) fail(`${where} has no list of messages`);
  if (given.nodes.length > MAX_NODES) fail(`${where} has ${given.nodes.length} messages, and ${MAX_NODES} is the limit`);
  const ids = new Map(); // old → new; a message comes after the one it answers
  const nodes = given.nodes.map((node, at) => readNode(node, ids, `${where}, message ${at + 1}`));
  const shown = new Map();
  for (const node of nodes) shown.set(node.parent, node.id);
  for (const [parent, child] of Array.isArray(given.shown) ? given.shown.filter(Array.isArray) : []) {
    const id = ids.get(child);
    const node = nodes.find((one) => one.id === id);
    if (node && node.parent === (parent === null ? null : ids.get(parent))) shown.set(node.parent, id);
  }
  return new Conversation({
    title: readText(given.title ?? "", `${where}'s title`).slice(0, MAX_TITLE_CHARS),
    created: readTime(given.created), updated: readTime(given.updated),
    settings: readSettings(given.settings), nodes, shown: [...shown],
  });
}

function readNode(given, ids, where) {
  if (given === null || typeof given !== "object") fail(`${where} is not an object`);
  if (!ROLES.includes(given.role)) fail(`${where} has the role ${JSON.stringify(given.role)?.slice(0, 40)}, which is none of ${ROLES.join(", ")}`);
  if (typeof given.id !== "string" || ids.has(given.id)) fail(`${where} has no id of its own`);
  if (given.parent !== null && !ids.has(given.parent)) fail(`${where} answers a message that does not come before it`);
  const node = { id: makeId(), parent: given.parent === null ? null : ids.get(given.parent), role: given.role, created: readTime(given.created) };
  ids.set(given.id, node.id);
  for (const name of ["content", "reasoning", "model", "finish", "answerId", "error"])
    if (given[name] !== undefined && given[name] !== null) node[name] = readText(given[name], `${where}'s ${name}`);
  node.content ??= "";
  if (STATES.includes(given.status)) node.status = given.status;
  if (given.isForced === true) node.isForced = true;
  if (Array.isArray(given.tokens)) node.tokens = given.tokens.slice(0, MAX_KEPT_TOKENS).map((token, at) => readToken(token, `${where}, token ${at + 1}`));
  if (Object.hasOwn(FORMS, given.form)) Object.assign(node, { form: given.form, schema: readText(given.schema ?? "", `${where}'s schema`) });
  if (given.figures && typeof given.figures === "object") node.figures = Object.fromEntries(Object.entries(given.figures).slice(0, 50).filter(([, value]) => Number.isFinite(value)));
  if (Array.isArray(given.toolCalls)) node.toolCalls = given.toolCalls.slice(0, 128).map((call, at) => readCall(call, `${where}, call ${at + 1}`));
  if (Array.isArray(given.results)) node.results = given.results.slice(0, 128).map((one) => ({ id: readText(one?.id, `${where}'s result`), content: readText(one?.content, `${where}'s result`) }));
  return node;
}

/** A token as [text, log probability, [[text, log probability], …]]. */
function readToken(given, where) {
  const [text, logprob, top] = Array.isArray(given) ? given : [];
  const read = (one) => [readText(one?.[0], where), Number.isFinite(one?.[1]) ? one[1] : null];
  return [...read([text, logprob]), Array.isArray(top) ? top.slice(0, 20).map(read) : []];
}

function readCall(given, where) {
  return { id: readText(given?.id, where), name: readText(given?.name, where), arguments: readText(given?.arguments, where) };
}

function readText(given, where) {
  if (typeof given !== "string") fail(`${where} is not text`);
  if (given.length > MAX_TEXT_CHARS) fail(`${where} has ${given.length} characters, and ${MAX_TEXT_CHARS} is the limit`);
  return given;
}

function readTime(given) {
  return Number.isFinite(given) && given > 0 && given < 8e15 ? given : Date.now();
}
