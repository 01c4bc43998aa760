// The block pool as a map: a square for each cell, drawn on a canvas; only squares that changed are drawn again.

import { fill, h } from "../dom.js";
import { colour, fit, onChange } from "./canvas.js";
import { count, plural } from "./words.js";

const KINDS = [
  { name: "free", hue: "--block-free", says: "free" },
  { name: "held", hue: "--block-held", says: "held by one request" },
  { name: "cached", hue: "--block-cached", says: "kept by the prefix cache alone" },
  { name: "shared", hue: "--block-shared", says: "shared by several requests" },
  { name: "evicted", hue: "--block-evicted", says: "evicted from the prefix cache in the last seconds" },
];
const MAX_CELLS = 4000;
const AREA = 150; // height to aim at
const [MIN_SIZE, MAX_SIZE] = [5, 15];

export function makeBlockMap() {
  const canvas = h("canvas", { class: "blocks-canvas", role: "img", "aria-label": "Map of the block pool" });
  const place = h("div", { class: "blocks-place" }, canvas);
  const says = h("p", { class: "blocks-says muted", text: "Point at a square to see which blocks it stands for." });
  const legend = h("ul", { class: "block-legend" });
  const counts = KINDS.map((kind) => {
    const number = h("b");
    legend.append(h("li", { title: kind.says },
      h("span", { class: `hue-mark block-${kind.name}` }), h("span", { text: kind.name === "evicted" ? "evicted lately" : kind.name }), number));
    return number;
  });
  const about = h("p", { class: "muted" });
  const element = h("div", { class: "blocks" }, about, place, legend, says);
  let cells = new Uint8Array();
  let drawn = new Uint8Array();
  let blocks = null;
  let columns = 1;
  let size = MIN_SIZE;

  function lay() {
    const width = place.clientWidth;
    if (!width || !cells.length) return;
    size = Math.max(MIN_SIZE, Math.min(MAX_SIZE, Math.floor(Math.sqrt(width * AREA / cells.length))));
    columns = Math.max(1, Math.floor(width / size));
    canvas.style.height = `${Math.ceil(cells.length / columns) * size}px`;
    drawn = new Uint8Array();
    draw();
  }

  function draw() {
    if (!canvas.clientWidth) return;
    const { context, width, height, isNew } = fit(canvas);
    const all = isNew || drawn.length !== cells.length;
    if (all) context.clearRect(0, 0, width, height);
    const colours = KINDS.map((kind) => colour(canvas, kind.hue));
    for (let at = 0; at < cells.length; at += 1) {
      if (!all && cells[at] === drawn[at]) continue;
      context.fillStyle = colours[cells[at]] ?? colours[0];
      context.fillRect(at % columns * size, Math.floor(at / columns) * size, size - 1, size - 1);
    }
    drawn = cells;
  }

  function tell(event) {
    const at = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    if (!blocks || at < 0 || at >= cells.length || event.offsetX >= columns * size) return;
    const first = at * blocks.blocks_per_cell;
    const last = Math.min(first + blocks.blocks_per_cell, blocks.num) - 1;
    const kind = KINDS[cells[at]] ?? KINDS[0];
    says.textContent = first === last ? `Block ${count(first)}: ${kind.says}`
      : `Blocks ${count(first)} to ${count(last)}: one of them is ${kind.says}`;
  }

  canvas.addEventListener("pointermove", tell);
  canvas.addEventListener("pointerdown", tell);
  const stop = onChange(place, lay);
  return {
    element,
    update(newBlocks) {
      const [before, perCell] = [cells.length, blocks?.blocks_per_cell];
      blocks = newBlocks;
      cells = decode(blocks.map);
      KINDS.forEach((kind, at) => {
        counts[at].textContent = kind.name === "evicted" ? `${count(blocks.evicted)} so far` : count(blocks[kind.name]);
      });
      fill(about, `${plural(blocks.num, "block")} of ${plural(blocks.block_size, "token")}`,
        blocks.blocks_per_cell > 1 && `, ${blocks.blocks_per_cell} to a square`);
      canvas.setAttribute("aria-label", `Map of the block pool: ${KINDS.slice(0, 4).map((kind) => `${blocks[kind.name]} ${kind.name}`).join(", ")}`);
      if (before !== cells.length || perCell !== blocks.blocks_per_cell) lay();
      else draw();
    },
    stop,
  };
}

function decode(text) {
  const raw = atob(text);
  const cells = new Uint8Array(Math.min(raw.length, MAX_CELLS));
  for (let at = 0; at < cells.length; at += 1) cells[at] = raw.charCodeAt(at);
  return cells;
}
