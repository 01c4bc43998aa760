// The live stream: one connection while a view that shows it is open and the tab is visible, and what is kept of it.

const WAITS_MS = [1000, 2000, 4000, 8000];
const SILENT_MS = 5000;
const DEAD_MS = 20000;
const KEPT_S = 300;
const GAP_S = 3;
const MAX_ENDED = 60;
const NAMES = ["generation_tokens_per_s", "prompt_tokens_per_s", "ttft_ms", "tpot_ms", "hit_rate", "step_ms"];

/** The rates of a model in the last five minutes; a value of null is a gap. */
export class History {
  times = [];
  values = Object.fromEntries(NAMES.map((name) => [name, []]));

  add(time, rates) {
    const last = this.times.at(-1);
    if (last !== undefined && time <= last) return;
    if (last !== undefined && time - last > GAP_S) this.#push(last + 0.001, null);
    this.#push(time, rates);
    let old = 0;
    while (this.times[old] < time - KEPT_S) old += 1;
    if (old) for (const list of [this.times, ...Object.values(this.values)]) list.splice(0, old);
  }

  #push(time, rates) {
    this.times.push(time);
    for (const name of NAMES) this.values[name].push(rates?.[name] ?? null);
  }
}

const histories = new Map(); // model → History; kept when a view is left
let ended = []; // requests, the last one first

export function historyOf(model) {
  if (!histories.has(model)) histories.set(model, new History());
  return histories.get(model);
}

export function listEnded() {
  return ended;
}

function keep(look) {
  const names = new Set(look.models.map((model) => model.name));
  for (const name of histories.keys()) if (!names.has(name)) histories.delete(name);
  for (const model of look.models) historyOf(model.name).add(look.time, model.rates);
  const known = new Set();
  ended = [...(look.ended ?? []), ...ended].filter((one) => {
    const key = `${one.id} ${one.begun}`;
    return !known.has(key) && known.add(key);
  }).slice(0, MAX_ENDED);
}

/** Look once, without asking for a key, to know what ended lately. */
export async function look(api, signal) {
  for await (const { data } of api.stream("admin/live", { signal, asks: false })) return keep(data);
}

/** Follow the stream until the returned function is called.
 *
 * onLook(look) is called for each event; onTrouble(text, canRetry) when there is none, with "" once there is again.
 * `canRetry` is true where only the reader can go on, by calling `again`.
 */
export function follow(api, { onLook, onTrouble }) {
  let abort = null;
  let isOver = false;
  let numFailures = 0;
  let waiting = 0;
  let heardMs = 0;

  async function run() {
    rest();
    abort?.abort();
    const mine = abort = new AbortController();
    heardMs = performance.now();
    try {
      for await (const { data } of api.stream("admin/live", { signal: mine.signal })) {
        if (isOver || mine.signal.aborted) return;
        heardMs = performance.now();
        numFailures = 0;
        keep(data);
        onTrouble("", false);
        onLook(data);
      }
      if (!isOver && !mine.signal.aborted) retry("The server ended the stream: it stops or restarts.");
    } catch (error) {
      if (isOver || mine.signal.aborted) return;
      if (error.status === 401 || error.status === 403) onTrouble(error.message, true);
      else retry(error.message);
    }
  }

  function retry(message) {
    const wait = WAITS_MS[Math.min(numFailures++, WAITS_MS.length - 1)];
    onTrouble(`${message} Trying again.`, false);
    waiting = setTimeout(run, wait);
  }

  function rest() {
    clearTimeout(waiting);
    waiting = 0;
  }

  function watch() {
    if (document.hidden || !abort || abort.signal.aborted || waiting) return;
    const silent = performance.now() - heardMs;
    if (silent > DEAD_MS) {
      abort.abort();
      retry("The server has been silent for a while.");
    } else if (silent > SILENT_MS) onTrouble(`No news for ${Math.round(silent / 1000)} s.`, false);
  }

  function turn() {
    if (document.hidden) {
      rest();
      abort?.abort();
    } else run();
  }

  document.addEventListener("visibilitychange", turn);
  const timer = setInterval(watch, 1000);
  if (!document.hidden) run();
  return {
    again: run,
    stop() {
      isOver = true;
      rest();
      clearInterval(timer);
      document.removeEventListener("visibilitychange", turn);
      abort?.abort();
    },
  };
}
