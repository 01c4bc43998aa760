// The server's models: what is loaded and known, the memory of each, load, unload and pull.

import { fill, h } from "../dom.js";
import { makePull } from "../live/pull.js";
import { bytes, count, plural, seconds } from "../live/words.js";

const POLL_MS = 5000;
const KINDS = ["weights", "cache"]; // of memory

export function mount(element, { api, toast }) {
  const list = h("div", { class: "cards" });
  const stored = h("div", { class: "cards" });
  const storedPart = h("section", { hidden: true }, h("h2", { text: "On disk" }), stored);
  const memory = h("p", { class: "muted" });
  const said = h("p", { class: "live-trouble", role: "status", hidden: true });
  const pull = makePull(api, toast, () => refresh());
  element.append(h("div", { class: "page models" }, said,
    h("section", {}, h("h2", { text: "Served" }), memory, list), storedPart, pull.element));
  const busy = new Map(); // model → what is done to it now
  let abort = new AbortController();
  let timer = 0;
  let isOver = false;
  let before = "";

  async function refresh() {
    clearTimeout(timer);
    abort.abort();
    const mine = abort = new AbortController();
    try {
      if (!document.hidden) show(await api.get("admin/models", { signal: mine.signal }));
      if (!document.hidden) said.hidden = true;
    } catch (error) {
      if (mine.signal.aborted) return;
      said.textContent = error.message;
      said.hidden = false;
      if (error.status === 401 || error.status === 403) return showNames();
    }
    if (!isOver && !mine.signal.aborted) timer = setTimeout(refresh, POLL_MS);
  }

  /** Show what those who are not the admin may know. */
  async function showNames() {
    pull.element.hidden = true;
    const again = h("button", { type: "button", text: "Give the admin key", on: { click: () => { pull.element.hidden = false; refresh(); } } });
    try {
      const { data } = await api.get("v1/models", { signal: abort.signal });
      fill(list, data.map((model) => h("article", { class: "card" }, makeTitle(model.id, model.loaded ? "ready" : "unloaded"))));
    } catch {
      fill(list);
    }
    list.append(again);
  }

  function show(told) {
    const key = JSON.stringify([told.models.map((model) => ({ ...model, idle_s: 0, resident_bytes: 0 })), told.stored, [...busy]]);
    const { free_bytes: free, budget_bytes: budget } = told.memory;
    memory.textContent = `${bytes(free)} of memory are free${budget ? `; all models together may take ${bytes(budget)}` : ""}.`;
    if (key === before) return; // buttons keep their focus
    before = key;
    fill(list, told.models.map((model) => makeCard(model, free)));
    storedPart.hidden = !told.stored.length;
    fill(stored, told.stored.map((model) => makeStored(model, told.can_add)));
    pull.element.hidden = !told.can_add;
  }

  function makeCard(model, free) {
    const facts = [
      model.architecture, model.quantization && `weights ${model.quantization}`,
      model.max_model_len && `${count(model.max_model_len)} tokens of context`, model.is_default && "the server's default",
      model.load_s !== undefined && `loaded in ${seconds(model.load_s)}`,
      model.keep_alive_s !== null && `unloaded after ${seconds(model.keep_alive_s)} of rest`,
      model.restarts && plural(model.restarts, "engine restart"),
    ];
    const canUnload = model.state !== "unloaded";
    return h("article", { class: "card" }, makeTitle(model.name, model.state, model.names.slice(1)),
      model.source !== model.name && h("p", { class: "muted clip", text: model.source, title: model.source }),
      h("p", { class: "muted", text: facts.filter(Boolean).join(" · ") || (model.file_bytes === null ? "Its files are not here yet: they are fetched when it is loaded." : "") }),
      model.is_loaded && makeMemory(model, free),
      h("div", { class: "card-foot" },
        h("span", { class: "muted", text: model.file_bytes === null ? "" : `${bytes(model.file_bytes)} on disk` }),
        busy.has(model.name) ? h("span", { class: "muted working", text: busy.get(model.name) })
          : canUnload ? makeButton(model.name, "unload", "Unload", "is unloaded", model.is_busy && "It has requests that run or wait.")
            : makeButton(model.name, "load", "Load", "is loaded")));
  }

  function makeStored(model, canAdd) {
    return h("article", { class: "card" }, makeTitle(model.name, "on disk"),
      model.source && model.source !== model.name && h("p", { class: "muted clip", text: model.source, title: model.source }),
      h("div", { class: "card-foot" }, h("span", { class: "muted", text: `${model.format}, ${bytes(model.file_bytes)}` }),
        busy.has(model.name) ? h("span", { class: "muted working", text: busy.get(model.name) })
          : canAdd && makeButton(model.name, "load", "Load", "is loaded")));
  }

  function makeButton(name, what, title, done, why) {
    return h("button", { type: "button", text: title, title: why || undefined, "aria-label": `${title} ${name}`, on: { click: () => act(name, what, done) } });
  }

  async function act(name, what, done) {
    busy.set(name, what === "load" ? "loading…" : "unloading…");
    refresh();
    try {
      await api.post(`admin/models/${what}`, { model: name });
      toast(`${name} ${done}.`);
    } catch (error) {
      toast(error.message, "error");
    }
    busy.delete(name);
    if (!isOver) refresh();
  }

  refresh();
  return () => {
    isOver = true;
    clearTimeout(timer);
    abort.abort();
    pull.stop();
  };
}

function makeTitle(name, state, more = []) {
  const kind = state === "ready" ? "is-good" : state.startsWith("failed") ? "is-bad" : state === "unloaded" || state === "on disk" ? "" : "is-warn";
  return h("header", { class: "card-head" },
    h("h3", { class: "clip", text: name, title: name }), h("span", { class: `badge ${kind}`, text: state }),
    more.length > 0 && h("span", { class: "muted", text: `also ${more.join(", ")}` }));
}

function makeMemory(model, free) {
  const { weights_bytes: weights, cache_bytes: cache } = model;
  const room = weights + cache + (model.gpu_bytes ? 0 : free) || 1;
  const part = (kind, value) => {
    const piece = h("span", { class: `memory-part memory-${kind}` });
    piece.style.width = `${(100 * value / room).toFixed(2)}%`;
    return piece;
  };
  const words = [`weights ${bytes(weights)}`, `cache ${bytes(cache)} for ${plural(model.cache_tokens, "token")}`];
  if (model.resident_bytes) words.push(`its process ${bytes(model.resident_bytes)}`);
  if (model.gpu_bytes) words.push(`of the GPU ${bytes(model.gpu_bytes)}`);
  return h("div", { class: "memory" },
    h("div", { class: "memory-bar", role: "img", "aria-label": words.join(", ") }, part("weights", weights), part("cache", cache)),
    h("p", { class: "memory-words" }, words.map((text, at) =>
      h("span", {}, at < KINDS.length && h("span", { class: `hue-mark memory-${KINDS[at]}` }), text))));
}
