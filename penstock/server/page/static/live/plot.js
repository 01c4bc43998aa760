// A small plot of the last five minutes: lines on a canvas, the latest value in words above it.

import { h } from "../dom.js";
import { colour, fit, onChange } from "./canvas.js";
import { clock } from "./words.js";

const SPAN_S = 300;
const PAD = 3;

/** Make a plot. `lines`: [{name, title, hue}] of the history; `format` words a value. */
export function makePlot({ title, note, lines, format }) {
  const value = h("span", { class: "plot-value", text: "–" });
  const detail = h("span", { class: "plot-detail" });
  const canvas = h("canvas", { class: "plot-canvas", role: "img", "aria-label": `${title}, last five minutes` });
  const top = h("span", { class: "plot-top" });
  const element = h("figure", { class: "plot", title: note },
    h("figcaption", {}, h("span", { class: "plot-title", text: title }), value, detail),
    h("div", { class: "plot-place" }, canvas, top));
  let history = null;
  let pointer = null;

  function draw() {
    if (!history || !canvas.clientWidth) return;
    const { context, width, height } = fit(canvas);
    context.clearRect(0, 0, width, height);
    const end = history.times.at(-1) ?? 0;
    const most = Math.max(0, ...lines.flatMap((line) => history.values[line.name]).filter((one) => one !== null));
    const limit = most > 0 ? round(most) : 1;
    const x = (time) => width - (end - time) / SPAN_S * width;
    const y = (number) => height - PAD - number / limit * (height - 2 * PAD);
    drawGrid(context, width, height);
    lines.forEach((line, at) => drawLine(context, line, at === 0, x, y, height));
    if (pointer !== null) drawPointer(context, x, y, height);
    top.textContent = most > 0 ? format(limit) : "";
    const latest = (line) => history.values[line.name].at(-1) ?? null;
    value.textContent = format(latest(lines[0]));
    detail.textContent = lines.slice(1).map((line) => `${line.title} ${format(latest(line))}`).join(" · ");
    canvas.setAttribute("aria-label", `${title}, last five minutes; now ${value.textContent}`);
  }

  function drawGrid(context, width, height) {
    context.strokeStyle = colour(canvas, "--line");
    context.lineWidth = 1;
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(PAD + part * (height - 2 * PAD)) + 0.5;
      context.beginPath();
      context.moveTo(0, at);
      context.lineTo(width, at);
      context.stroke();
    }
  }

  function drawLine(context, line, isFirst, x, y, height) {
    const { times, values } = history;
    const list = values[line.name];
    context.strokeStyle = context.fillStyle = colour(canvas, line.hue);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    for (let begin = 0; begin < list.length; begin += 1) {
      if (list[begin] === null) continue;
      let last = begin;
      while (last + 1 < list.length && list[last + 1] !== null) last += 1;
      context.beginPath();
      for (let at = begin; at <= last; at += 1) context.lineTo(x(times[at]), y(list[at]));
      if (last === begin) context.lineTo(x(times[begin]) + 1, y(list[begin]));
      context.stroke();
      if (isFirst) {
        context.lineTo(x(times[last]), height);
        context.lineTo(x(times[begin]), height);
        context.globalAlpha = 0.12;
        context.fill();
        context.globalAlpha = 1;
      }
      begin = last;
    }
  }

  function drawPointer(context, x, y, height) {
    const at = nearest(history.times, history.times.at(-1) - (canvas.clientWidth - pointer) / canvas.clientWidth * SPAN_S);
    if (at < 0) return;
    const left = Math.round(x(history.times[at])) + 0.5;
    context.strokeStyle = colour(canvas, "--line-strong");
    context.beginPath();
    context.moveTo(left, 0);
    context.lineTo(left, height);
    context.stroke();
    const words = lines.map((line) => `${line.title ? `${line.title} ` : ""}${format(history.values[line.name][at])}`);
    canvas.title = `${clock(history.times[at])}: ${words.join(", ")}`;
  }

  canvas.addEventListener("pointermove", (event) => {
    pointer = event.offsetX;
    draw();
  });
  canvas.addEventListener("pointerleave", () => {
    pointer = null;
    draw();
  });
  const stop = onChange(canvas, draw);
  return {
    element,
    update(newHistory) {
      history = newHistory;
      draw();
    },
    stop,
  };
}

/** Round up to 1, 2 or 5 times a power of ten. */
export function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((one) => one * power >= value * 0.999999) * power;
}

function nearest(times, time) {
  let best = -1;
  for (let at = 0; at < times.length; at += 1)
    if (best < 0 || Math.abs(times[at] - time) < Math.abs(times[best] - time)) best = at;
  return best;
}
