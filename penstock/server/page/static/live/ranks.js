// The processes of a model that has several, a row each, and the last that was lost.

import { fill, h } from "../dom.js";
import { bytes, clock, seconds } from "./words.js";

const TITLES = ["Rank", "State", "Stage", "Layers", "Share", "Process", "Weights", "Cache", "Resident", "Machine's free", "Last heartbeat"];

/** Show the ranks of a model's engines; returns false for a model that has one rank. */
export function fillRanks(element, model) {
  const engines = (model.replicas ?? [model]).filter((one) => one.ranks);
  const rows = engines.flatMap((engine) => engine.ranks.map((one) => makeRow(engine, one)));
  const losses = engines.filter((engine) => engine.lost_rank).map(describeLoss);
  fill(element, [
    h("table", { class: "rows" }, h("thead", {}, h("tr", {}, TITLES.map((text) => h("th", { scope: "col", text })))),
      h("tbody", {}, rows)),
    ...losses.map((text) => h("p", { class: "muted", text })),
  ]);
  return rows.length > 0;
}

function makeRow(engine, one) {
  const values = [
    nameReplica(engine) + one.rank, one.is_up ? "up" : "silent", one.stage, `${one.first_layer} to ${one.last_layer}`, one.shard,
    `${one.pid} on ${one.node}`, bytes(one.weight_bytes), bytes(one.cache_bytes), bytes(one.resident_bytes),
    bytes(one.free_bytes), `${seconds(one.silence_s)} ago`,
  ];
  return h("tr", {}, values.map((value, at) => h("td", { dataset: { title: TITLES[at] }, text: value })));
}

function describeLoss(engine) {
  const { at, back_at: back, why } = engine.lost_rank;
  const end = back === null ? "the engine is not back yet" : `the engine was back at ${clock(back)}`;
  return `${nameReplica(engine)}lost at ${clock(at)}: ${why}; ${end}`;
}

function nameReplica(engine) {
  return engine.replica === undefined ? "" : `replica ${engine.replica}, `;
}
