// The engines of a model that has several: what each is for, what it runs, and how full its pool is.

import { fill, h } from "../dom.js";
import { plural, share } from "./words.js";

const ROLES = { prefill: "computes prompts", decode: "answers" };

/** Show the replicas of a model; returns false where there is one engine alone. */
export function fillReplicas(element, replicas = []) {
  fill(element, replicas.map(makeReplica));
  return replicas.length > 0;
}

function makeReplica(one) {
  const used = one.blocks ? one.used_blocks / one.blocks : 0;
  const bar = h("div", { class: "bar-part" });
  bar.style.width = `${(100 * used).toFixed(1)}%`;
  const words = [
    plural(one.rows, "answer"),
    one.pending_prompt_tokens && `${plural(one.pending_prompt_tokens, "prompt token")} to compute`,
    `${share(used)} of its blocks used`,
    one.prompt_tokens ? `${share(one.cached_tokens / one.prompt_tokens)} of prompts cached` : "no prompt yet",
    one.restarts && plural(one.restarts, "restart"),
  ];
  return h("div", { class: "replica" },
    h("header", { class: "replica-head" }, h("b", { text: `Replica ${one.replica}` }),
      h("span", { class: `badge ${one.state === "ready" ? "is-good" : "is-warn"}`, text: one.state }),
      ROLES[one.role] && h("span", { class: "muted", text: ROLES[one.role] })),
    h("div", { class: "bar-track", title: "Used blocks" }, bar),
    h("p", { class: "muted", text: words.filter(Boolean).join(" · ") }));
}
