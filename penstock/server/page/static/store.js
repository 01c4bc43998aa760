// Settings of this browser, in its own storage. They hold no keys and no texts.

const PREFIX = "penstock.";
const listeners = new Map();
const inMemory = new Map(); // where the browser refuses storage

function read(name) {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return inMemory.get(name) ?? null;
  }
}

export const store = {
  /** Return a setting, or `otherwise` where there is none or it cannot be read. */
  get(name, otherwise = null) {
    const text = read(name) ?? inMemory.get(name) ?? null;
    if (text === null) return otherwise;
    try {
      return JSON.parse(text);
    } catch {
      return otherwise;
    }
  },

  /** Keep a setting, and tell who watches it. */
  set(name, value) {
    const text = JSON.stringify(value);
    inMemory.set(name, text);
    try {
      localStorage.setItem(PREFIX + name, text);
    } catch {
      // storage is full or forbidden: the setting lasts as long as the page
    }
    for (const listener of listeners.get(name) ?? []) listener(value);
  },

  /** Call `listener` at every change; returns a function that ends it. */
  watch(name, listener) {
    const all = listeners.get(name) ?? new Set();
    listeners.set(name, all.add(listener));
    return () => all.delete(listener);
  },
};
