// Draws the conversation as a tree: the current path runs straight down, other branches stand to its right.

import * as talk from "/page/conversation.js";
import { state, subscribe, pathTo } from "/page/state.js";
import { $, h, s } from "/page/dom.js";
import { describe } from "/page/costs.js";
import { bytes, clip, count } from "/page/format.js";

const ROW = 34, LANE = 16, LEFT = 14, CHARACTER = 6.9;
let shown = null;
let focused = null;
let seen = null;

export function start() {
  $("tree-panel").append(h("h2", { class: "panel-title" }, "Tree"),
    h("p", { class: "empty" }, "The tree of this conversation appears here. Each edit, regenerated reply and branch is one more line, and none is lost."),
    h("div", { id: "tree", hidden: true }),
    h("div", { class: "legend" },
      h("span", null, h("i", { class: "dot level-0" }), "free to go to"),
      h("span", null, h("i", { class: "dot level-1" }), "some tokens"),
      h("span", null, h("i", { class: "dot level-2" }), "the whole prompt")));
  subscribe(draw);
  new ResizeObserver(() => { shown = null; draw(); }).observe($("tree-panel"));
}

/** Return rows in the order in which they are drawn: `{node, lane, parentRow, parentLane, onPath}`. */
export function layOut(nodes, head) {
  const current = new Set(pathTo(head, nodes).map((node) => node.id));
  const below = new Map();
  for (const node of nodes.values()) {
    const parent = node.parent ?? null;
    below.set(parent, [...(below.get(parent) ?? []), node]);
  }
  const rows = [], stack = [];
  const add = (parent, lane, parentRow) => {
    const children = below.get(parent) ?? [];
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
  panel.querySelector(".empty").hidden = nodes.size > 0;
  panel.querySelector(".legend").hidden = nodes.size === 0;
  box.hidden = nodes.size === 0;
  const width = panel.clientWidth - 24;
  const is = nodes.size && width > 0 ? `${width} ${head} ${[...nodes.values()].map((n) => `${n.id}${n.cost?.compute_tokens}${n.pinned}${n.text.length}`).join()}` : "";
  if (is === shown) return;
  shown = is;
  const hadFocus = box.contains(document.activeElement);
  if (!is) { box.replaceChildren(); return; }
  const rows = layOut(nodes, head);
  if (!nodes.has(focused)) focused = head ?? rows[0].node.id;
  const items = rows.map((row, i) => item(row, i, rows, width, head));
  box.replaceChildren(s("svg", { width, height: rows.length * ROW + 4, role: "tree", "aria-label": "The conversation as a tree" },
    rows.map((row, i) => edge(row, i)), items));
  if (hadFocus) box.querySelector("[tabindex='0']")?.focus();
  else if (head !== seen) box.querySelector(".head")?.scrollIntoView({ block: "nearest" });
  seen = head;
}

const x = (lane) => LEFT + Math.min(lane, 9) * LANE;
const y = (i) => i * ROW + ROW / 2;

function edge(row, i) {
  if (row.parentRow < 0) return null;
  const from = { x: x(row.parentLane), y: y(row.parentRow) }, to = { x: x(row.lane), y: y(i) };
  const d = from.x === to.x ? `M${from.x} ${from.y}V${to.y}` : `M${from.x} ${from.y}V${to.y - 12}q0 12 ${to.x - from.x} 12`;
  return s("path", { d, class: row.onPath ? "edge current" : "edge" });
}

function item(row, i, rows, width, head) {
  const { node, lane } = row, cost = describe(node.cost), isHead = node.id === head;
  const left = x(lane) + 13, who = node.role === "assistant" ? "A reply" : node.role === "user" ? "Your message" : node.role;
  const room = Math.floor((width - left - 10 - (cost.short.length + 1) * CHARACTER * 0.95) / CHARACTER);
  const own = node.bytes && node.bytes.own + node.bytes.shared ? `${bytes(node.bytes.own)} of its own, ${bytes(node.bytes.shared)} shared` : "no checkpoint of its own";
  const tip = `${cost.words}\n${own}\n${count(node.position, "token")} up to here${node.pinned ? "\npinned" : ""}`;
  const snippet = clip(node.text.replace(/\s+/g, " ").trim() || "(empty)", Math.max(3, room));
  const go = () => talk.attempt(() => talk.goTo(node.id));
  const element = s("g", {
    role: "treeitem", class: `node ${node.role} ${row.onPath ? "on-path" : ""} ${isHead ? "head" : ""}`, tabindex: node.id === focused ? 0 : -1,
    "aria-label": `${snippet} ${cost.short}. ${who}. Going here is ${cost.words}`, "aria-level": lane + 1, "aria-selected": String(isHead), "data-tip": tip, "data-node": node.id,
    onclick: go, onfocus: () => { focused = node.id; },
    onkeydown: (event) => {
      const to = { ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: rows.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go(); }
      if (rows[to] === undefined) return;
      event.preventDefault();
      const next = element.parentNode.querySelector(`[data-node="${CSS.escape(rows[to].node.id)}"]`);
      element.setAttribute("tabindex", -1);
      next.setAttribute("tabindex", 0);
      next.focus();
    },
  },
  s("rect", { class: "hit", x: 0, y: i * ROW + 1, width, height: ROW - 2, rx: 7 }),
  s("circle", { class: "dot", cx: x(lane), cy: y(i), r: node.role === "assistant" ? 5.5 : 4.5 }),
  node.pinned && s("circle", { class: "pinned", cx: x(lane), cy: y(i), r: 8.5 }),
  s("text", { class: "snippet", x: left, y: y(i) + 4.5 }, snippet, " "),
  s("text", { class: `cost level-${cost.level}`, x: width - 8, y: y(i) + 4, "text-anchor": "end" }, cost.short));
  return element;
}
