// Shows the memory live. It listens only while it is visible, so that the server takes no snapshots in vain.

import * as api from "/page/api.js";
import { state, subscribe } from "/page/state.js";
import { $, h, update } from "/page/dom.js";
import { bytes, count, percent, whole } from "/page/format.js";
import { partsOf, partBar } from "/page/costs.js";
import * as arena from "/page/arena.js";
import * as sequence from "/page/sequence.js";
import * as sequences from "/page/sequences.js";

const parts = {};
let chosen = "newest";
let listening = null;
let last = null;
let rates = null;
let rest = 0;
let shownReplica = null;

const term = (name, words = name) => h("span", { class: "term", "data-term": name, tabindex: "0" }, words);

export function start() {
  for (const name of ["meter", "now", "request", "arena", "sequences", "one"]) parts[name] = h("div", { class: `part part-${name}` });
  $("memory-panel").append(h("h2", { class: "panel-title" }, "Memory"), h("p", { id: "memory-state", class: "quiet", role: "status" }, "Connecting …"), h("p", { id: "memory-of", class: "quiet", hidden: true }), ...Object.values(parts));
  arena.start(parts.arena, choose);
  sequences.start(parts.sequences, choose);
  sequence.start(parts.one);
  subscribe(() => drawRequest());
  api.onReplicaChange(follow);
  document.addEventListener("visibilitychange", check);
  $("inspector").addEventListener("transitionend", check);
  new ResizeObserver(check).observe($("memory-panel"));
  check();
}

/** Return the last snapshot that was shown. */
export const snapshot = () => last;

const isSeen = () => !document.hidden && $("memory-panel").checkVisibility({ visibilityProperty: true });

/** Listen if the panel can be seen, and stop if not. */
export function check() {
  if (!parts.meter) return; // not started yet
  if (isSeen() && !listening) listen();
  if (!isSeen() && listening) { listening.abort(); listening = null; }
}

/** Choose the sequence whose layers are shown; "newest" follows the newest one. */
export function choose(id) {
  if (id === chosen) return;
  chosen = id;
  listening?.abort();
  listening = null;
  check();
}

/** Show the memory of the replica that answers now, in a fleet of several. */
function follow() {
  chosen = "newest"; // sequences of another replica have the same numbers
  listening?.abort();
  listening = null;
  check();
}

function drawReplica() {
  const name = api.replicaName();
  $("memory-of").hidden = name === null;
  $("memory-of").replaceChildren("Of replica ", h("span", { class: "term", "data-term": "replica", tabindex: "0" }, name ?? ""), ", which answers you. The others have memories of their own, which are not shown here.");
}

async function listen() {
  const mine = new AbortController();
  listening = mine;
  for (let wait = 500; listening === mine; wait = Math.min(8000, wait * 2)) {
    try {
      for await (const { event, data } of api.memoryEvents(chosen, mine.signal)) {
        if (event === "closed") chosen = "newest";
        else show(data);
        wait = 500;
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.code === "sequence_not_found") { chosen = "newest"; continue; }
      $("memory-state").textContent = error.status === 401 ? "The memory is shown once the key is known." : `${error.message} Trying again …`;
      $("memory-state").hidden = false;
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

function show(data) {
  const began = performance.now();
  $("memory-state").hidden = true;
  if (shownReplica !== api.replicaName()) { shownReplica = api.replicaName(); last = null; drawReplica(); }
  rates = last && data.at > last.at ? {
    steps: (data.engine.n_steps - last.engine.n_steps) / (data.at - last.at),
    tokens: (data.engine.n_fed - last.engine.n_fed) / (data.at - last.at),
  } : null;
  last = data;
  clearTimeout(rest);
  rest = setTimeout(() => { rates = null; drawNow(data); }, 1500); // nothing has changed since: no step was taken
  drawMeter(data);
  drawNow(data);
  drawRequest();
  arena.draw(data, chosen);
  sequences.draw(data);
  sequence.draw(data, chosen === "newest");
  const took = performance.now() - began;
  document.documentElement.dataset.memoryMs = took.toFixed(2);
  document.dispatchEvent(new CustomEvent("memory", { detail: { data, took } }));
}

function drawMeter(data) {
  const { budget, used, host, disk, beside } = data.bytes;
  const bar = h("div", { class: "meter", role: "img", "aria-label": `${bytes(used)} of ${bytes(budget)} in use` });
  const kinds = data.kinds.filter((kind) => kind.total);
  for (const kind of kinds) {
    const piece = h("span", { class: `is-${kind.colour}` });
    piece.style.flexGrow = kind.total / budget;
    bar.append(piece);
  }
  const free = h("span", { class: "free" });
  free.style.flexGrow = Math.max(0, 1 - used / budget);
  bar.append(free);
  const rows = kinds.map((kind) => h("tr", null,
    h("th", { scope: "row" }, h("i", { class: `swatch is-${kind.colour}` }), term(kind.kind.includes("page") ? "pages" : kind.kind.includes("tail") ? "tails" : "states", kind.kind)),
    h("td", { class: "quiet" }, `${kind.group.replace("_", " ")}, ${count(kind.n_layers, "layer")}`), h("td", { class: "number" }, bytes(kind.total))));
  const outside = [["swapped out to host memory", host], ["swapped out to files", disk], ["offloaded pages", beside["offloaded pages"]]]
    .filter(([, n]) => n).map(([words, n]) => h("tr", null, h("th", { scope: "row", colspan: "2" }, h("i", { class: "swatch outside" }), term("swapped", words)), h("td", { class: "number" }, bytes(n))));
  update(parts.meter,
    h("p", { class: "big" }, h("b", null, bytes(used)), h("span", null, " of ", term("budget", bytes(budget)), ` · ${percent(used, budget)}`)),
    bar,
    h("table", { class: "kinds" }, h("caption", { class: "hidden" }, "Bytes by kind"), h("tbody", null, rows, outside)),
    data.bytes.shared ? h("p", { class: "quiet" }, bytes(data.bytes.shared), " of it ", term("shared"), " by several sequences") : "");
}

function drawNow(data) {
  const { running, waiting, preempted, n_taken_back: takenBack } = data.engine;
  const tile = (value, name, words) => h("div", { class: "tile" }, h("b", null, value), term(name, words));
  update(parts.now,
    tile(rates ? rates.steps.toFixed(rates.steps < 9.95 ? 1 : 0) : "0", "speed", "steps a second"),
    tile(whole(running), "running"), tile(whole(waiting), "waiting"),
    preempted || data.sequences.n_swapped_out ? tile(whole(Math.max(preempted, data.sequences.n_swapped_out)), "swapped", "swapped out") : "",
    takenBack ? tile(whole(takenBack), "takenBack", takenBack === 1 ? "call taken back" : "calls taken back") : "");
}

let drawnUsage = null;

function drawRequest() {
  const usage = last?.last_request ?? state.lastUsage;
  if (!usage || usage === drawnUsage) return;
  drawnUsage = usage;
  const split = partsOf(usage);
  const item = (name, n) => h("span", null, h("i", { class: `swatch ${name}` }), h("b", null, whole(n)), " ", term(name));
  update(parts.request, h("h3", null, "The last prompt"), partBar(split),
    h("p", { class: "row" }, item("reused", split.reused), item("replayed", split.replayed), item("computed", split.computed)),
    split.why ? h("p", { class: "quiet why" }, split.why) : "");
}
