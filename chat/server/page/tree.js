// Draws the conversation as a tree: the current path runs straight down, and other branches are to its right.

import * as talk from "/page/conversation.js";
import { state, subscribe, pathTo, childrenOf } from "/page/state.js";
import { $, h, s } from "/page/dom.js";
import { describe } from "/page/costs.js";
import { bytes, clip, count } from "/page/format.js";

const STEPS = ["○", "◐", "●"]; // what going somewhere costs: nothing, a part of the prompt, all of it
const ROW = 34, LANE = 16, LEFT = 14, CHARACTER = 6.9, MARGIN = 6;
const items = new Map(); // id of a node -> its element, of the rows that are drawn
let rows = [];
let svg, edges;
let shown = null;
let focused = null;
let seen = null;

export function start() {
  $("tree-panel").append(h("h2", { class: "panel-title" }, "Tree"),
    h("p", { class: "empty" }, "The tree of this conversation appears here. Each edit, regenerated reply and branch is one more line, and none is lost."),
    h("div", { id: "tree", hidden: true }),
    h("div", { class: "legend" },
      ["free to go to", "some tokens", "the whole prompt"].map((words, level) => h("span", null, h("b", null, STEPS[level]), words))));
  subscribe(draw);
  new ResizeObserver(() => { shown = null; draw(); }).observe($("tree-panel"));
  let isDue = false; // scrolling says so more often than the screen can show it
  $("tree-panel").addEventListener("scroll", () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; drawSeen(); });
  }, { passive: true });
}

/** Return rows in the order in which they are drawn: `{node, lane, parentRow, parentLane, onPath}`. */
export function layOut(nodes, head) {
  const current = new Set(pathTo(head, nodes).map((node) => node.id));
  const rows = [], stack = [];
  const add = (parent, lane, parentRow) => {
    const children = childrenOf(parent, nodes);
    const main = children.find((child) => current.has(child.id)) ?? children.at(-1);
    // What is added last is drawn first: the branches beside, and then the main line below them.
    if (main) stack.push({ node: main, lane, parentRow });
    for (const child of children.toReversed()) if (child !== main) stack.push({ node: child, lane: lane + 1, parentRow });
  };
  add(null, 0, -1);
  while (stack.length) {
    const row = { ...stack.pop(), onPath: false };
    row.onPath = current.has(row.node.id);
    row.parentLane = rows[row.parentRow]?.lane ?? row.lane;
    rows.push(row);
    add(row.node.id, row.lane, rows.length - 1);
  }
  return rows;
}

function draw() {
  const panel = $("tree-panel"), box = $("tree"), { nodes, head } = state;
  const width = panel.clientWidth - 24;
  if (shown && shown.nodes === nodes && shown.head === head && shown.width === width) return;
  panel.querySelector(".empty").hidden = nodes.size > 0;
  panel.querySelector(".legend").hidden = nodes.size === 0;
  box.hidden = nodes.size === 0;
  const hadFocus = box.contains(document.activeElement);
  rows = nodes.size && width > 0 ? layOut(nodes, head) : [];
  shown = { nodes, head, width };
  items.clear();
  if (!rows.length) { box.replaceChildren(); return; }
  if (!nodes.has(focused)) focused = head ?? rows[0].node.id;
  edges = s("g", { "aria-hidden": "true" });
  svg = s("svg", { width, height: rows.length * ROW + 4, role: "tree", "aria-label": "The conversation as a tree" }, edges);
  box.replaceChildren(svg);
  if (head !== seen) reveal(rows.findIndex((row) => row.node.id === head));
  drawSeen();
  if (hadFocus) items.get(focused)?.focus({ preventScroll: true });
  seen = head;
}

/** Scroll so that a row can be seen. */
function reveal(i) {
  const panel = $("tree-panel"), top = svg.getBoundingClientRect().top - panel.getBoundingClientRect().top + i * ROW;
  const covered = panel.querySelector(".panel-title").offsetHeight; // it stays above what scrolls
  if (top < covered) panel.scrollTop += top - covered;
  else if (top + ROW > panel.clientHeight) panel.scrollTop += top + ROW - panel.clientHeight;
}

/** Draw the rows in view, and the one that Tab leads to: of a tree of thousands no more is made than is seen. */
function drawSeen() {
  if (!rows.length) return;
  const panel = $("tree-panel"), top = panel.getBoundingClientRect().top - svg.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(top / ROW) - MARGIN), end = Math.min(rows.length, Math.ceil((top + panel.clientHeight) / ROW) + MARGIN);
  const at = rows.findIndex((row) => row.node.id === focused);
  const wanted = rows.slice(first, end).map((_, k) => first + k);
  if (at < first) wanted.unshift(at);
  else if (at >= end) wanted.push(at);
  const ids = new Set(wanted.map((i) => rows[i].node.id));
  for (const [id, element] of items) if (!ids.has(id)) { element.remove(); items.delete(id); }
  wanted.forEach((i, k) => {
    const { id } = rows[i].node;
    if (!items.has(id)) items.set(id, item(rows[i], i));
    const element = items.get(id), before = svg.children[k + 1] ?? null; // behind the edges
    if (before !== element) svg.insertBefore(element, before);
  });
  edges.replaceChildren(...rows.flatMap((row, i) => (row.parentRow >= 0 && row.parentRow < end && i >= first ? [edge(row, i)] : [])));
}

const x = (lane) => LEFT + Math.min(lane, 9) * LANE;
const y = (i) => i * ROW + ROW / 2;

function edge(row, i) {
  const from = { x: x(row.parentLane), y: y(row.parentRow) }, to = { x: x(row.lane), y: y(i) };
  const d = from.x === to.x ? `M${from.x} ${from.y}V${to.y}` : `M${from.x} ${from.y}V${to.y - 12}q0 12 ${to.x - from.x} 12`;
  return s("path", { d, class: row.onPath ? "edge current" : "edge" });
}

function focus(i) {
  items.get(focused)?.setAttribute("tabindex", -1);
  focused = rows[i].node.id;
  reveal(i);
  drawSeen();
  const element = items.get(focused);
  element.setAttribute("tabindex", 0);
  element.focus({ preventScroll: true });
}

function item(row, i) {
  const { node, lane } = row, cost = describe(node.cost), { width, head } = shown, isHead = node.id === head;
  const left = x(lane) + 13, who = node.role === "assistant" ? "A reply" : node.role === "user" ? "Your message" : node.role;
  const room = Math.floor((width - left - 10 - (cost.short.length + 3) * CHARACTER * 0.95) / CHARACTER);
  const own = node.bytes && node.bytes.own + node.bytes.shared ? `${bytes(node.bytes.own)} of its own, ${bytes(node.bytes.shared)} shared` : "no checkpoint of its own";
  const tip = `${cost.words}\n${own}\n${count(node.position, "token")} up to here${node.pinned ? "\npinned" : ""}`;
  const snippet = clip(node.text.slice(0, 400).replace(/\s+/g, " ").trim() || "(empty)", Math.max(3, room));
  const go = () => talk.attempt(() => talk.goTo(node.id));
  return s("g", {
    role: "treeitem", class: `node ${node.role} ${row.onPath ? "on-path" : ""} ${isHead ? "head" : ""}`, tabindex: node.id === focused ? 0 : -1,
    "aria-label": `${snippet} ${cost.short}. ${who}. Going here is ${cost.words}`, "aria-level": lane + 1, "aria-posinset": i + 1, "aria-setsize": rows.length,
    "aria-selected": String(isHead), "data-tip": tip, "data-node": node.id,
    onclick: go, onfocus: () => { focused = node.id; },
    onkeydown: (event) => {
      const to = { ArrowDown: i + 1, ArrowUp: i - 1, PageDown: Math.min(i + 10, rows.length - 1), PageUp: Math.max(i - 10, 0), Home: 0, End: rows.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go(); }
      if (rows[to] === undefined) return;
      event.preventDefault();
      focus(to);
    },
  },
  s("rect", { class: "hit", x: 0, y: i * ROW + 1, width, height: ROW - 2, rx: 7 }),
  s("circle", { class: "dot", cx: x(lane), cy: y(i), r: node.role === "assistant" ? 5.5 : 4.5 }),
  node.pinned && s("circle", { class: "pinned", cx: x(lane), cy: y(i), r: 8.5 }),
  s("text", { class: "snippet", x: left, y: y(i) + 4.5 }, snippet, " "),
  s("text", { class: `cost level-${cost.level}`, x: width - 8, y: y(i) + 4, "text-anchor": "end" }, cost.short && `${cost.short} ${STEPS[cost.level]}`));
}
