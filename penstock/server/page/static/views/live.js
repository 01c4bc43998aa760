// The batch as it runs, the queue, the block pool and rates, for every model of the server.

import { fill, h } from "../dom.js";
import { makeBlockMap } from "../live/block_map.js";
import { follow, historyOf, listEnded } from "../live/feed.js";
import { makePlot } from "../live/plot.js";
import { fillRanks } from "../live/ranks.js";
import { fillReplicas } from "../live/replicas.js";
import { makeEnded, makeRows } from "../live/rows.js";
import { milliseconds, plural, rate, requestPath, seconds, share } from "../live/words.js";

const LONG_STEP_S = 1.5;
const PLOTS = [
  { title: "Tokens per second", note: "Tokens made, and prompt tokens computed, over two seconds", format: rate,
    lines: [{ name: "generation_tokens_per_s", title: "out", hue: "--hue-1" }, { name: "prompt_tokens_per_s", title: "in", hue: "--hue-2" }] },
  { title: "First token", note: "TTFT: from a request's arrival to its first token, mean of ten seconds", format: milliseconds,
    lines: [{ name: "ttft_ms", title: "", hue: "--hue-3" }] },
  { title: "Further tokens", note: "TPOT: between two tokens of an answer, mean of ten seconds", format: milliseconds,
    lines: [{ name: "tpot_ms", title: "", hue: "--hue-4" }] },
  { title: "Prefix hits", note: "Share of prompt tokens that were found in the prefix cache", format: share,
    lines: [{ name: "hit_rate", title: "", hue: "--hue-5" }] },
  { title: "Step", note: "Time of a step of the engine, mean of two seconds", format: milliseconds,
    lines: [{ name: "step_ms", title: "", hue: "--hue-2" }] },
];

export function mount(element, { api, route }) {
  if (openRequest(route.parts)) return () => {};
  route.watch(openRequest);
  const trouble = h("p", { class: "live-trouble", role: "status", hidden: true });
  const again = h("button", { type: "button", text: "Try again", hidden: true, on: { click: () => feed.again() } });
  const models = h("div", { class: "live-models" });
  const ended = makeEnded();
  const endedPart = h("section", { class: "box", hidden: true }, h("h2", { text: "Ended lately" }), h("div", { class: "rows-place" }, ended.element));
  const waiting = h("p", { class: "notice", text: "Waiting for the server…" });
  element.append(h("div", { class: "live page" }, h("div", { class: "live-trouble-line" }, trouble, again), waiting, models, endedPart));
  const shown = new Map(); // model → its section

  function onLook(look) {
    waiting.hidden = true;
    const names = look.models.map((model) => model.name);
    for (const [name, section] of shown) {
      if (names.includes(name)) continue;
      section.stop();
      section.element.remove();
      shown.delete(name);
    }
    for (const model of look.models) {
      if (!shown.has(model.name)) {
        shown.set(model.name, makeSection(model.name));
        models.append(shown.get(model.name).element);
      }
      shown.get(model.name).update(model);
    }
    endedPart.hidden = !listEnded().length;
    ended.update(listEnded().slice(0, 30));
  }

  function onTrouble(text, canRetry) {
    trouble.textContent = text;
    trouble.hidden = !text;
    again.hidden = !canRetry;
    waiting.hidden = waiting.hidden || Boolean(text);
    models.classList.toggle("is-stale", Boolean(text));
  }

  const feed = follow(api, { onLook, onTrouble });
  return () => {
    feed.stop();
    for (const section of shown.values()) section.stop();
  };
}

/** Lead from #/live/ID, which others may link to, to the request's timeline. */
function openRequest(parts) {
  if (parts.length) location.replace(`#/${requestPath(parts.join("/"))}`);
  return parts.length > 0;
}

function makeSection(name) {
  const state = h("span", { class: "badge" });
  const facts = h("span", { class: "muted" });
  const plots = PLOTS.map(makePlot);
  const map = makeBlockMap();
  const mapSilence = h("p", { class: "muted", text: "The engine has not told of its blocks yet." });
  const rows = makeRows();
  const rowsTitle = h("h3");
  const queue = h("div", { class: "queue" });
  const replicas = h("div", { class: "replicas" });
  const replicasBox = h("section", { class: "box" }, h("h3", { text: "Replicas" }), replicas);
  const ranks = h("div", { class: "rows-place ranks" });
  const ranksBox = h("section", { class: "box" }, h("h3", { text: "Ranks" }), ranks);
  const inside = h("div", { class: "live-inside" },
    h("div", { class: "plots" }, plots.map((plot) => plot.element)),
    h("div", { class: "live-pair" },
      h("section", { class: "box box-wide" }, rowsTitle, rows.element),
      h("div", { class: "live-side" },
        h("section", { class: "box" }, h("h3", { text: "Blocks" }), mapSilence, map.element),
        h("section", { class: "box" }, h("h3", { text: "Queue" }), queue), replicasBox)), ranksBox);
  const element = h("section", { class: "live-model", "aria-label": name },
    h("header", { class: "live-head" }, h("h2", { class: "clip", text: name, title: name }), state, facts), inside);

  function update(model) {
    const isLoaded = model.rates !== null;
    inside.hidden = !isLoaded;
    state.textContent = model.state;
    state.className = `badge ${model.state === "ready" ? "is-good" : model.state === "unloaded" ? "" : "is-warn"}`;
    facts.textContent = [
      model.restarts && plural(model.restarts, "engine restart"),
      model.age_s > LONG_STEP_S && `in a step for ${seconds(model.age_s)}`,
    ].filter(Boolean).join(" · ");
    if (!isLoaded) return;
    for (const plot of plots) plot.update(historyOf(name));
    rowsTitle.textContent = `Batch: ${describeRows(model.rows, model.num_rows)}`;
    rows.update(model);
    fillQueue(queue, model.queue);
    replicasBox.hidden = !fillReplicas(replicas, model.replicas);
    ranksBox.hidden = !fillRanks(ranks, model);
    map.element.hidden = !model.blocks;
    mapSilence.hidden = Boolean(model.blocks);
    if (model.blocks) map.update(model.blocks);
  }

  return {
    element,
    update,
    stop() {
      for (const plot of plots) plot.stop();
      map.stop();
    },
  };
}

function describeRows(rows, total) {
  const numbers = new Map();
  for (const row of rows) numbers.set(row.state, (numbers.get(row.state) ?? 0) + 1);
  const parts = [...numbers].map(([state, number]) => `${number} ${state}`);
  return total ? `${plural(total, "answer")} (${parts.join(", ")})` : "idle";
}

function fillQueue(element, queue) {
  if (!queue.length) return fill(element, h("p", { class: "muted", text: "No request waits for its turn." }));
  const most = Math.max(...queue.map((one) => one.requests));
  return fill(element, [...queue].sort((a, b) => b.requests - a.requests).slice(0, 20).map((one) => {
    const bar = h("div", { class: "bar-part" });
    bar.style.width = `${100 * one.requests / most}%`;
    return h("div", { class: "queue-row" }, h("span", { class: "clip", text: one.tenant || "all", title: one.tenant }),
      h("div", { class: "bar-track" }, bar),
      h("span", { class: "muted", text: `${plural(one.requests, "request")}, ${plural(one.tokens, "prompt token")}` }));
  }));
}
