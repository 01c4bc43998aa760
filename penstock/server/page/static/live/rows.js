// The running and waiting answers, a row each. Elements are kept from look to look, so links hold still under a finger.

import { fill, h } from "../dom.js";
import { count, plural, requestPath, seconds } from "./words.js";

const MAX_SHOWN = 128;
const STATES = {
  queued: "waits for its turn",
  grammar: "its grammar is compiled",
  prefill: "computes its prompt",
  decode: "makes tokens",
  preempted: "gave its blocks back and waits",
  restart: "waits for another engine: its own died",
};
const TITLES = ["Request", "Tenant", "State", "Prompt", "Output", "Drafts", "Preempted", "Age"];

export function makeRows() {
  const body = h("tbody");
  const more = h("p", { class: "muted" });
  const none = h("p", { class: "muted", text: "No request runs or waits." });
  const table = h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, TITLES.map((text) => h("th", { scope: "col", text })))), body);
  const element = h("div", { class: "rows-place" }, table, none, more);
  const known = new Map(); // "id index" → row

  function update(model) {
    const shown = model.rows.slice(0, MAX_SHOWN);
    const keys = new Set();
    let before = null;
    for (const data of shown) {
      const key = `${data.id} ${data.index}`;
      if (keys.has(key)) continue;
      keys.add(key);
      if (!known.has(key)) known.set(key, makeRow(data));
      const row = known.get(key);
      row.update(data);
      const place = before ? before.nextSibling : body.firstChild;
      if (place !== row.element) body.insertBefore(row.element, place);
      before = row.element;
    }
    for (const [key, row] of known) {
      if (keys.has(key)) continue;
      row.element.remove();
      known.delete(key);
    }
    table.hidden = !shown.length;
    none.hidden = shown.length > 0;
    const left = model.num_rows - shown.length;
    more.hidden = left <= 0;
    more.textContent = `and ${plural(left, "more answer")}`;
  }

  return { element, update };
}

function makeRow(data) {
  const cell = (title, ...children) => h("td", { dataset: { title } }, ...children);
  const state = h("span", { class: "state" });
  const place = h("div", { class: "bar-words" });
  const prompt = makeBar("cached");
  const output = makeBar();
  const [drafts, preempted, age] = [h("span"), h("span"), h("span")];
  const name = data.index ? `${data.id} #${data.index}` : data.id;
  const element = h("tr", {},
    cell("Request", h("a", { class: "request-link", href: `#/${requestPath(data.id)}`, title: `${name}: show its timeline`, text: shorten(data.id) + (data.index ? ` #${data.index}` : "") })),
    cell("Tenant", h("span", { class: "clip", text: data.tenant || "–", title: data.tenant })),
    cell("State", state, place), cell("Prompt", prompt.element), cell("Output", output.element),
    cell("Drafts", drafts), cell("Preempted", preempted), cell("Age", age));

  function update(one) {
    state.textContent = one.state;
    place.textContent = one.replica === undefined ? "" : `replica ${one.replica}`;
    state.className = `state state-${STATES[one.state] ? one.state : "other"}`;
    state.title = STATES[one.state] ?? "";
    const computed = Math.min(one.computed_tokens, one.prompt_tokens);
    prompt.update([Math.min(one.cached_tokens, one.prompt_tokens), computed], one.prompt_tokens,
      `${count(computed)} / ${count(one.prompt_tokens)}${one.cached_tokens ? ` (${count(one.cached_tokens)} cached)` : ""}`);
    output.update([one.output_tokens], one.max_tokens, `${count(one.output_tokens)} / ${count(one.max_tokens)}`);
    drafts.textContent = one.draft_tokens ? `${count(one.accepted_tokens)} of ${count(one.draft_tokens)}` : "–";
    drafts.title = one.draft_tokens ? `${Math.round(100 * one.accepted_tokens / one.draft_tokens)} % of the draft tokens were accepted` : "";
    preempted.textContent = one.preemptions ? count(one.preemptions) : "–";
    preempted.className = one.preemptions ? "alarm" : "is-none";
    drafts.className = one.draft_tokens ? "" : "is-none";
    age.textContent = seconds(one.age_s);
  }

  return { element, update };
}

/** Make a bar of parts that lie over each other, the first in front. */
function makeBar(front) {
  const over = front && h("span", { class: `bar-part bar-${front}` });
  const under = h("span", { class: "bar-part" });
  const words = h("span", { class: "bar-words" });
  const element = h("div", { class: "progress" }, h("div", { class: "bar-track" }, under, over), words);
  return {
    element,
    update(values, total, text) {
      const width = (value) => `${total ? Math.min(100, 100 * value / total).toFixed(1) : 0}%`;
      if (over) over.style.width = width(values[0]);
      under.style.width = width(values.at(-1));
      words.textContent = text;
    },
  };
}

/** Keep the end of an id, where ids differ. */
export function shorten(id) {
  return id.length > 20 ? `…${id.slice(-10)}` : id;
}

/** Make the table of requests that ended. */
export function makeEnded() {
  const body = h("tbody");
  const titles = ["Request", "Model", "Tenant", "Prompt", "Output", "First token", "Total", "End"];
  const element = h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, titles.map((text) => h("th", { scope: "col", text })))), body);
  let before = "";
  return {
    element,
    update(ended) {
      const key = ended.map((one) => one.id + one.begun).join();
      if (key === before) return;
      before = key;
      fill(body, ended.map(describeEnded));
    },
  };
}

function describeEnded(one) {
  const cell = (title, text, props = {}) => h("td", { dataset: { title } }, h("span", { text, ...props }));
  const isGood = one.status !== null && one.status < 400;
  const end = isGood ? one.finish_reasons.join(", ") || "ended" : `status ${one.status ?? "unknown"}`;
  const marks = [one.preemptions && plural(one.preemptions, "preemption"), one.restarts && plural(one.restarts, "engine restart")];
  return h("tr", {},
    h("td", { dataset: { title: "Request" } }, h("a", { class: "request-link", href: `#/${requestPath(one.id)}`, title: `${one.id}: show its timeline`, text: shorten(one.id) })),
    cell("Model", one.model, { class: "clip", title: one.model }), cell("Tenant", one.tenant || "–", { class: "clip" }),
    cell("Prompt", count(one.prompt_tokens) + (one.cached_tokens ? ` (${count(one.cached_tokens)} cached)` : "")),
    cell("Output", count(one.output_tokens)), cell("First token", seconds(one.ttft_s)), cell("Total", seconds(one.e2e_s)),
    cell("End", [end, ...marks.filter(Boolean)].join(", "), { class: isGood && !one.restarts ? "" : "alarm" }));
}
