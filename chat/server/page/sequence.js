// Shows one sequence: its tokens with the rollback window and checkpoints, and what each layer holds of it.

import { h, s, update } from "/page/dom.js";
import { bytes, count, whole } from "/page/format.js";

const NAME = 92, ROW = 16;
let box;
let panelWidth = 0;

export function start(element) {
  box = element;
  new ResizeObserver(([entry]) => { panelWidth = entry.contentRect.width; }).observe(box.parentNode);
}

/** Draw the sequence that a snapshot describes. */
export function draw(data, isNewest) {
  const one = data.sequence;
  if (!one) { box.replaceChildren(); return; }
  panelWidth ||= box.parentNode.clientWidth - 24;
  const width = Math.max(200, panelWidth), room = width - NAME - 8, length = Math.max(1, one.length);
  // Most of a long text is body: the newest tokens get half of the width, so that the tail can be seen.
  const tails = one.layers.flatMap((layer) => layer.parts.filter((part) => part.part === "tail").map((part) => part.start));
  const newest = Math.max(0, Math.min(one.horizon, ...tails));
  const isLong = one.length > 8 * (one.length - newest) && one.length > newest;
  const zoomAt = isLong ? Math.max(0, one.length - 2 * (one.length - newest)) : 0;
  const x = (token) => NAME + (isLong
    ? (token <= zoomAt ? token / zoomAt * room / 2 : room / 2 + (token - zoomAt) / (length - zoomAt) * room / 2)
    : token / length * room);
  const what = one.is_checkpoint ? "Checkpoint" : "Sequence";
  const height = 46 + one.layers.length * ROW + 4;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${what} ${one.id}: ${count(one.length, "token")}, can go back to ${one.horizon} at no cost` });
  svg.append(...strip(one, x, room), ...one.layers.flatMap((layer, i) => row(layer, 46 + i * ROW, one, x)));
  if (isLong) svg.append(s("path", { class: "break", d: `M${x(zoomAt)} 14V${height}` }));
  update(box,
    h("h3", null, h("span", { class: "term", "data-term": "sequence", tabindex: "0" }, `${what} ${one.id}`), h("span", { class: "quiet" }, isNewest ? "the newest" : "chosen")),
    h("p", { class: "quiet" }, `${count(one.length, "token")}; `, h("span", { class: "term", "data-term": "window", tabindex: "0" }, "goes back"),
      ` to ${whole(one.horizon)} at no cost`, one.n_checkpoints ? `, and to ${count(one.n_checkpoints, "checkpoint")}` : "", one.is_swapped ? "; it is swapped out" : ""),
    h("div", { class: "strip" }, svg));
}

function strip(one, x, room) {
  const at = 22;
  const parts = [
    s("text", { x: 0, y: at + 5, class: "label" }, "tokens"),
    s("rect", { x: x(0), y: at - 5, width: Math.max(1, x(one.length) - x(0)), height: 10, rx: 2, class: "text-range" }),
    s("rect", { x: x(one.horizon), y: at - 5, width: Math.max(2, x(one.length) - x(one.horizon)), height: 10, rx: 2, class: "window-range", "data-term": "window" }),
  ];
  for (const [length, id] of one.checkpoints.slice(-200)) {
    parts.push(s("path", { d: `M${x(length)} ${at - 9}l4 -6h-8z`, class: "checkpoint", "data-tip": `checkpoint ${id}: ${count(length, "token")}` }));
  }
  const last = NAME + room;
  parts.push(s("text", { x: NAME, y: at + 18, class: "tick" }, "0"), s("text", { x: last, y: at + 18, class: "tick", "text-anchor": "end" }, whole(one.length)));
  return parts;
}

function row(layer, y, one, x) {
  const [name] = layer.label.split("  ");
  const total = layer.parts.reduce((sum, part) => sum + part.n_bytes, 0);
  const tip = `layer ${layer.layer}: ${name}\n${layer.parts.map((part) => `${part.part}: ${part.end < 0 ? "stale, computed again by the next step" : part.part === "head" ? `at ${whole(part.end)}` : `tokens ${whole(part.start)} … ${whole(part.end)}`}, ${bytes(part.n_bytes)}`).join("\n") || "remembers nothing"}`;
  const marks = [s("rect", { class: "hit", x: 0, y, width: x(one.length) + 8, height: ROW - 1, "data-tip": `${tip}\n${bytes(total)} in all` }),
    s("text", { x: 0, y: y + 11, class: "label" }, `${layer.layer} ${name.split(", ").at(-1).slice(0, 13)}`)];
  for (const part of layer.parts.toSorted((a, b) => (a.part === "head") - (b.part === "head"))) {
    const start = Math.max(0, part.start), end = Math.min(one.length, Math.max(start, part.end));
    if (part.part === "head") {
      const at = part.end < 0 ? one.length : end;
      marks.push(s("path", { class: `part-head ${part.end < 0 ? "stale" : ""}`, d: `M${x(at)} ${y + 2}l5 5.500l-5 5.500l-5 -5.500z` }));
    } else {
      marks.push(s("rect", { class: `part-${part.part}`, x: x(start), y: y + 2, width: Math.max(1.5, x(end) - x(start)), height: 11, rx: 1.500 }));
    }
  }
  return marks;
}
