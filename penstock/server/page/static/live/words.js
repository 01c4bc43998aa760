// Numbers in words.

/** Format a duration in seconds. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0095) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 0.9995) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 99.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

export function milliseconds(value) {
  return value === null || value === undefined ? "–" : seconds(value / 1000);
}

export function rate(value) {
  return value === null || value === undefined ? "–" : value >= 99.95 ? count(Math.round(value)) : value.toFixed(1);
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.0995 && value > 0 ? 1 : 0)} %`;
}

/** Group the digits of a number by thousands. */
export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

/** Format bytes in powers of 1024, as memory is. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let at = 0;
  while (size >= 1023.5 && at + 1 < units.length) {
    size /= 1024;
    at += 1;
  }
  return `${at && size < 99.5 ? size.toFixed(1) : Math.round(size)} ${units[at]}`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString([], { hour12: false });
}

/** Return what may follow "#/" to show a request's timeline. */
export function requestPath(id) {
  return `requests/${encodeURIComponent(id)}`;
}
