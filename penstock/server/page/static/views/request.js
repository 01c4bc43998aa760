// A request's timeline: its stages as a bar that adds up to its wall time, with the causes in words.

import { fill, h } from "../dom.js";
import { keys } from "../keys.js";
import { listEnded, look } from "../live/feed.js";
import { makeEnded } from "../live/rows.js";
import { clock, count, plural, requestPath, seconds, share } from "../live/words.js";

const POLL_MS = 1000;
const STAGES = {
  receive: "read and checked",
  load: "waited for its model to be loaded",
  tokenize: "rendered by the chat template and encoded",
  grammar: "had its grammar tried, or compiled",
  queue: "waited in the admission queue",
  wait: "waited in the engine for a row or for blocks",
  prefill: "computed prompt tokens",
  decode: "made tokens",
  preempted: "gave its blocks back and waited to resume",
  restart: "waited for another engine, as the one it ran in died",
  respond: "had its response formatted and written",
  slow_client: "waited for the client to read",
  more: "went through further stages; the totals have them",
};

export function mount(element, { api, route }) {
  const input = h("input", { type: "search", "aria-label": "Id of a request", placeholder: "chatcmpl-…, msg_…, resp_… or an x-request-id", autocomplete: "off", spellcheck: "false" });
  const find = h("button", { type: "button", class: "primary", text: "Explain" });
  const said = h("p", { class: "live-trouble", role: "alert", hidden: true });
  const shown = h("div", { class: "timeline" });
  const recent = makeEnded();
  const recentPart = h("section", { class: "box" }, h("h2", { text: "Ended lately" }), h("div", { class: "rows-place" }, recent.element));
  element.append(h("div", { class: "page" },
    h("div", { class: "search-line" }, input, find),
    h("p", { class: "muted", text: "Every response has its id in its body and in the header x-request-id. The server keeps the last 2,000 requests." }),
    said, shown, recentPart));
  let abort = new AbortController();
  let timer = 0;

  function search() {
    const id = input.value.trim();
    if (id) route.go(requestPath(id));
  }

  function open(parts) {
    const id = parts.join("/"); // an id may have slashes
    input.value = id;
    said.hidden = true;
    shown.replaceChildren();
    showRecent();
    load(id);
  }

  function showRecent() {
    recentPart.hidden = !listEnded().length;
    recent.update(listEnded().slice(0, 30));
  }

  async function load(id) {
    clearTimeout(timer);
    abort.abort();
    if (!id) return;
    const mine = abort = new AbortController();
    try {
      const path = `admin/requests/${id.split("/").map(encodeURIComponent).join("/")}`;
      const timeline = await api.get(path, { signal: mine.signal });
      if (mine.signal.aborted) return;
      said.hidden = true;
      draw(shown, timeline);
      if (timeline.state !== "finished") timer = setTimeout(poll, POLL_MS, id);
    } catch (error) {
      if (mine.signal.aborted) return;
      said.textContent = error.message;
      said.hidden = false;
      if (error.status === 0 && shown.firstChild) timer = setTimeout(poll, 2 * POLL_MS, id);
    }
  }

  function poll(id) {
    if (document.hidden) timer = setTimeout(poll, POLL_MS, id);
    else load(id);
  }

  find.addEventListener("click", search);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") search();
  });
  route.watch(open);
  open(route.parts);
  const looking = new AbortController();
  if (keys.get("admin") || !keys.get("api")) look(api, looking.signal).then(showRecent, () => {}); // only the admin may
  if (!route.parts.length) input.focus();
  return () => {
    clearTimeout(timer);
    abort.abort();
    looking.abort();
  };
}

function draw(element, timeline) {
  const total = timeline.totals.e2e_s;
  const bar = h("div", { class: "stages", role: "img", "aria-label": `Stages of ${seconds(total)}` });
  const list = h("ol", { class: "stage-list" });
  for (const stage of timeline.stages) {
    const part = total > 0 ? stage.duration_s / total : 0;
    const kind = STAGES[stage.name] ? stage.name : "more";
    const piece = h("span", { class: `stage stage-${kind}`, title: `${stage.name}: ${seconds(stage.duration_s)}${stage.why ? `, ${stage.why}` : ""}` });
    piece.style.flexGrow = String(Math.max(part, 0.000001));
    const line = h("li", {},
      h("span", { class: `hue-mark stage-${kind}` }),
      h("div", { class: "stage-words" },
        h("div", {}, h("b", { text: stage.name }), h("span", { class: "muted", text: ` ${STAGES[stage.name] ?? ""}` })),
        stage.why && h("div", { class: "stage-why", text: stage.why })),
      h("span", { class: "stage-time", text: seconds(stage.duration_s) }),
      h("span", { class: "stage-share muted", text: share(part) }));
    const mark = (isOn) => () => {
      piece.classList.toggle("is-marked", isOn);
      line.classList.toggle("is-marked", isOn);
    };
    for (const one of [piece, line]) {
      one.addEventListener("pointerenter", mark(true));
      one.addEventListener("pointerleave", mark(false));
    }
    bar.append(piece);
    list.append(line);
  }
  const sum = timeline.stages.reduce((all, stage) => all + stage.duration_s, 0);
  fill(element,
    h("header", { class: "live-head" }, h("h2", { class: "clip", text: timeline.id, title: timeline.id }),
      h("span", { class: `badge ${timeline.state === "finished" ? timeline.status < 400 ? "is-good" : "is-bad" : "is-warn"}`, text: describeState(timeline) })),
    h("p", { class: "muted", text: describeRequest(timeline) }),
    drawTiles(timeline.totals),
    h("section", { class: "box" }, h("h3", { text: "Where its time went" }), bar,
      h("p", { class: "muted stage-sum", text: `${plural(timeline.stages.length, "stage")} add up to ${sum.toFixed(3)} s of ${total.toFixed(3)} s` }), list),
    listRanks(timeline));
}

/** List the processes that computed it, where its model has several, and those that were lost. */
function listRanks({ ranks, lost_ranks: lost }) {
  if (!ranks) return null;
  return h("section", { class: "box" }, h("h3", { text: "Ranks" }),
    h("ul", { class: "muted" }, ranks.map((one) => h("li", { text: `rank ${one.rank}: layers ${one.first_layer} to ${one.last_layer}, process ${one.pid} on ${one.node}` }))),
    lost.map((one) => h("p", { text: `Lost at ${clock(one.at)}: ${one.why}${one.back_at === null ? "" : `; the engine was back at ${clock(one.back_at)}`}` })));
}

function describeState(timeline) {
  if (timeline.state !== "finished") return timeline.state;
  const reasons = [...new Set(timeline.finish_reasons)].join(", ");
  return timeline.status < 400 ? reasons || "finished" : `status ${timeline.status}`;
}

function describeRequest(timeline) {
  const parts = [timeline.model, timeline.tenant && `tenant ${timeline.tenant}`, timeline.route, `at ${clock(timeline.begun)}`];
  if (timeline.replicas) parts.push(`replica ${timeline.replicas.join(", then ")}`);
  if (timeline.request_id !== timeline.id) parts.push(`x-request-id ${timeline.request_id}`);
  return parts.filter(Boolean).join(" · ");
}

function drawTiles(totals) {
  const tiles = [
    ["Wall time", seconds(totals.e2e_s)],
    ["First token", seconds(totals.ttft_s)],
    ["Prompt", `${count(totals.prompt_tokens)}${totals.cached_tokens ? ` (${count(totals.cached_tokens)} cached)` : ""}`],
    ["Output", count(totals.output_tokens)],
    ["Tokens per second", totals.decode_s > 0 && totals.output_tokens > 1 ? ((totals.output_tokens - 1) / totals.decode_s).toFixed(1) : "–"],
    ["Prompt chunks", count(totals.prompt_chunks)],
    totals.draft_tokens && ["Drafts accepted", `${count(totals.accepted_tokens)} of ${count(totals.draft_tokens)}`],
    totals.preemptions && ["Preemptions", count(totals.preemptions)],
    totals.restarts && ["Engine restarts", count(totals.restarts)],
    totals.client_wait_s > 0.0005 && ["Waited for client", seconds(totals.client_wait_s)],
    totals.energy_mj !== undefined && ["Energy", `${(totals.energy_mj / 1000).toFixed(2)} J`],
  ];
  return h("dl", { class: "tiles" }, tiles.filter(Boolean).map(([title, text]) => h("div", { class: "tile" }, h("dt", { text: title }), h("dd", { text }))));
}
