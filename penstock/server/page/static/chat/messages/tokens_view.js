// The tokens of an answer, coloured by their share; hover or focus one to see what else it could have been.

import { h, newId } from "../../dom.js";

const GAP_PX = 6; // between a token and its alternatives
const LEVELS = [0.9, 0.6, 0.3, 0.1]; // shares that part the colours
const NAMES = ["over 90 %", "60 to 90 %", "30 to 60 %", "10 to 30 %", "under 10 %"];

export function shareOf(logprob) {
  return Math.exp(Math.min(0, logprob));
}

function levelOf(share) {
  const at = LEVELS.findIndex((least) => share >= least);
  return at < 0 ? LEVELS.length : at;
}

export function formatShare(share) {
  if (share >= 0.9995) return "100 %";
  return share >= 0.001 ? `${(100 * share).toFixed(1)} %` : "< 0.1 %";
}

function showText(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(nothing)";
}

/** Make the view of [text, log probability, alternatives] tokens. */
export function makeTokensView(tokens) {
  const id = newId("alternatives");
  const popup = h("div", { class: "alternatives", role: "tooltip", id, hidden: true });
  const text = h("div", { class: "tokens", role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" },
    tokens.map(([token, logprob], at) => [
      h("span", { class: `token level-${levelOf(shareOf(logprob))}`, tabindex: at ? "-1" : "0", dataset: { at }, text: token.replaceAll("\n", "↵") || "∅" }),
      token.includes("\n") ? h("br") : null,
    ]));
  const legend = h("ul", { class: "token-legend", "aria-label": "Colours: a token's share" },
    NAMES.map((name, at) => h("li", {}, h("span", { class: `token-swatch level-${at}` }), name)));
  const view = h("div", { class: "tokens-view" }, text, popup, legend);
  const show = (event) => {
    const token = event.target.closest?.(".token");
    if (token) showAlternatives(view, popup, token, tokens[Number(token.dataset.at)]);
  };
  const hide = () => { popup.hidden = true; };
  text.addEventListener("mouseover", show);
  text.addEventListener("focusin", show);
  text.addEventListener("mouseleave", hide);
  text.addEventListener("focusout", hide);
  text.addEventListener("keydown", (event) => moveFocus(event, text));
  return view;
}

function showAlternatives(view, popup, token, [text, logprob, top]) {
  const rows = top.some(([other]) => other === text) ? top : [[text, logprob], ...top];
  popup.replaceChildren(...rows.map(([other, value]) => makeRow(other, shareOf(value), other === text)));
  popup.hidden = false;
  token.setAttribute("aria-describedby", popup.id);
  const [box, own] = [view.getBoundingClientRect(), token.getBoundingClientRect()];
  const left = Math.min(own.left - box.left, box.width - popup.offsetWidth);
  popup.style.left = `${Math.max(0, left)}px`;
  const seen = view.closest(".scroller")?.getBoundingClientRect() ?? { top: 0, bottom: innerHeight };
  const [above, below] = [own.top - GAP_PX - popup.offsetHeight, own.bottom + GAP_PX];
  const isBelow = below + popup.offsetHeight <= seen.bottom || above < seen.top;
  popup.style.top = `${(isBelow ? below : above) - box.top}px`;
}

function makeRow(text, share, isChosen) {
  const bar = h("span", { class: "share" }, h("span", { class: "share-bar" }));
  bar.firstChild.style.width = `${100 * share}%`;
  return h("div", { class: isChosen ? "alternative chosen" : "alternative" },
    h("code", { text: showText(text) }), bar, h("span", { class: "share-text", text: formatShare(share) }));
}

function moveFocus(event, text) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const from = event.target.closest(".token");
  if (!step || !from) return;
  const next = text.querySelector(`[data-at="${Number(from.dataset.at) + step}"]`);
  if (!next) return;
  event.preventDefault();
  from.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
