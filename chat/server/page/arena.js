// Draws the arena on a canvas: each range of bytes in the colour of its kind, read like text.

import { h, update } from "/page/dom.js";
import { bytes, whole } from "/page/format.js";
import { place, hide } from "/page/tips.js";

const ROWS = 12, ROW = 13, GAP = 2;
let canvas, caption, legend;
let boxes = [];
let drawn = null;
let width = 0; // is known without asking, which would make the browser lay out all that has changed
let colours = null;

/** Make the map inside an element; `choose(id)` is called with the sequence that is clicked. */
export function start(box, choose) {
  canvas = h("canvas", { role: "img" });
  caption = h("p", { class: "quiet" });
  legend = h("p", { class: "row" });
  box.append(h("h3", null, h("span", { class: "term", "data-term": "arena", tabindex: "0" }, "Where it lies")), canvas, legend, caption);
  const find = (event) => {
    const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    return [boxes.find((one) => x >= one.x - 1 && x <= one.x + one.w + 1 && y >= one.y && y <= one.y + ROW), frame];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [found, frame] = find(event);
    if (!found) { hide(); canvas.style.cursor = ""; return; }
    canvas.style.cursor = found.owner >= 0 ? "pointer" : "";
    place(words(found), event.clientX, frame.top + found.y, frame.top + found.y + ROW);
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("click", (event) => { const [found] = find(event); if (found?.owner >= 0) choose(found.owner); });
  const again = () => { colours = null; if (drawn) draw(...drawn); };
  new ResizeObserver(([entry]) => { width = entry.contentRect.width; again(); }).observe(canvas.parentNode);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

function words(one) {
  const who = one.owner === -1 ? "set aside by the step in progress" : one.owner === -2 ? "of several sequences" : `of sequence ${one.owner}`;
  return `${one.pool}, ${bytes(one.bytes)} ${who}${one.shared ? `\n${one.shared === 100 ? "shared with others" : `${one.shared} % shared`}` : ""}${one.owner >= 0 ? "\nclick to see its layers" : ""}`;
}

function readColours() {
  const style = getComputedStyle(canvas), read = (name) => style.getPropertyValue(`--${name}`).trim();
  return { pool: read, free: read("free"), surface: read("surface"), ink: read("ink") };
}

/** Draw the arena of a snapshot. */
export function draw(data, chosen) {
  drawn = [data, chosen];
  const { arena } = data;
  width ||= canvas.parentNode.clientWidth;
  if (!width) return;
  colours ??= readColours();
  const total = arena.regions.reduce((sum, [start, end]) => sum + end - start, 0);
  const rowBytes = Math.max(1, Math.ceil(total / ROWS)), scale = devicePixelRatio || 1;
  const height = ROWS * (ROW + GAP);
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) { canvas.height = Math.round(height * scale); canvas.style.height = `${height}px`; }
  const paint = canvas.getContext("2d");
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  paint.clearRect(0, 0, width, height);
  paint.fillStyle = colours.free;
  for (let row = 0; row < ROWS; row += 1) paint.fillRect(0, row * (ROW + GAP), width, ROW);
  boxes = [];
  const of_pools = arena.pool_colours.map(colours.pool);
  let before = 0;
  const perByte = width / rowBytes, own = data.sequence?.id;
  for (const [start, end] of arena.regions) {
    for (let i = 0; i < arena.starts.length; i += 1) {
      if (arena.starts[i] < start || arena.starts[i] >= end) continue;
      let at = before + arena.starts[i] - start;
      const stop = before + arena.ends[i] - start;
      while (at < stop) {
        const row = Math.floor(at / rowBytes), until = Math.min(stop, (row + 1) * rowBytes);
        boxes.push({ x: (at - row * rowBytes) * perByte, y: row * (ROW + GAP), w: Math.max(1, (until - at) * perByte), pool: arena.pool_names[arena.pools[i]],
          colour: of_pools[arena.pools[i]], owner: arena.owners[i], shared: arena.shared_percent[i], used: arena.used_percent[i], bytes: arena.ends[i] - arena.starts[i] });
        at = until;
      }
    }
    before += end - start;
  }
  for (const one of boxes) {
    paint.globalAlpha = one.used < 34 ? 0.4 : one.used < 67 ? 0.7 : 1;
    paint.fillStyle = one.colour;
    paint.fillRect(one.x, one.y, one.w, ROW);
  }
  paint.globalAlpha = 1;
  paint.fillStyle = colours.surface;
  for (const one of boxes) {
    if (arena.is_exact && one.w > 4) paint.fillRect(one.x + one.w - 1, one.y, 1, ROW);
    if (one.shared > 50 && one.w > 3) paint.fillRect(one.x + 1, one.y + ROW / 2 - 1, one.w - 2.5, 2);
  }
  paint.fillStyle = colours.ink;
  for (const one of boxes) if (own !== undefined && one.owner === own) paint.fillRect(one.x, one.y + ROW - 2, Math.max(1, one.w - 1), 2);
  update(legend, arena.pool_names.map((name, i) => h("span", null, h("i", { class: `swatch is-${arena.pool_colours[i]}` }), name)),
    h("span", null, h("i", { class: "swatch shared-line" }), "shared"), h("span", null, h("i", { class: "swatch own-line" }), "of the one chosen"));
  const hidden = data.bytes.budget - total;
  caption.textContent = total ? `${bytes(rowBytes)} a row${hidden > 0 ? `; ${bytes(hidden)} are free, and left out` : ""}` : "Nothing is in use.";
  canvas.setAttribute("aria-label", `Map of ${bytes(data.bytes.used)} in ${whole(arena.starts.length)} ranges: ${data.kinds.filter((kind) => kind.total).map((kind) => `${kind.kind} ${bytes(kind.total)}`).join(", ")}`);
}
