// Canvases that keep sharp at any zoom and follow the page's colours.

/** Fit a canvas's pixels to its place; returns its context, with a unit of one CSS pixel, and its size. */
export function fit(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  const isNew = canvas.width !== w || canvas.height !== h;
  if (isNew) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height, isNew };
}

export function colour(element, name) {
  return getComputedStyle(element).getPropertyValue(name).trim();
}

/** Call when the colours or the size of an element may have changed; returns a function that stops it. */
export function onChange(element, call) {
  const size = new ResizeObserver(call);
  size.observe(element);
  const theme = new MutationObserver(call);
  theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", call);
  return () => {
    size.disconnect();
    theme.disconnect();
    dark.removeEventListener("change", call);
  };
}
