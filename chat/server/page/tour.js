// Shows in five steps what the memory does, by doing it. It uses the page as a reader would.

import * as talk from "/page/conversation.js";
import * as api from "/page/api.js";
import { state, pathTo, childrenOf, isReply, set, sampling } from "/page/state.js";
import { $, h } from "/page/dom.js";
import { bytes, count, percent } from "/page/format.js";
import { partsOf } from "/page/costs.js";
import { showPanel } from "/page/layout.js";

const SEEN = "hybrid-memory.tour";
const AT_ONCE = 24, NEARLY_FULL = 0.9;
let card = null;

const lastReply = () => pathTo(state.head).findLast(isReply);
const firstOfUser = () => pathTo(state.head).find((node) => node.role === "user");
const isBranched = () => [null, ...state.nodes.keys()].some((id) => childrenOf(id).length > 1);
const answer = () => `It says: “${lastReply()?.text ?? "…"}”`;

// What a step says after it was done is put together from what happened: each sentence has its condition.
const STEPS = [
  {
    title: "Tell it a fact", panel: "tree", verb: "Tell it",
    text: "Say that your cat is called Milo, and ask. The model reads each token once; what it remembers is kept, and the panel “Memory” shows it.",
    act: async () => { talk.startNew(); await talk.send("My cat is called Milo."); await talk.send("What is my cat called?"); },
    after: () => answer(),
  },
  {
    title: "Change the past", panel: "tree", verb: "Edit it",
    text: "Now your first message is edited: the cat is called Luna. Then the question is asked again.",
    act: async () => { const first = firstOfUser(); await talk.edit(first.id, "My cat is called Luna.", true); await talk.send("What is my cat called?"); },
    after: () => `${answer()}${isBranched() ? " The conversation with Milo is still there: see the panel “Tree”." : ""}`,
  },
  {
    title: "Branch", panel: "tree", verb: "Make a branch",
    text: "Go back to the reply before the question and ask something else. Both branches begin with the same messages.",
    act: async () => { const path = pathTo(state.head), reply = path.filter(isReply).at(-2) ?? path.find(isReply); await talk.goTo(reply.id); await talk.send("My dog is called Rex."); },
    after: () => (isBranched() ? "Each line of the tree is a branch. Beside it stands what going there would cost." : "The messages were added to the same line."),
  },
  {
    title: "See what was reused", panel: "memory", verb: "Show me",
    text: "The branch begins with messages that the model had read before. How much of its prompt did it read again?",
    act: async () => {},
    after: () => saidOfReuse(partsOf(state.lastUsage ?? {})),
  },
  {
    title: "Fill the memory", panel: "memory", verb: `Start ${AT_ONCE} replies`,
    text: `${AT_ONCE} conversations at once. When the budget is full, conversations wait for room, or they make room and go on later.`,
    act: async () => { filled = await fill(); },
    after: () => saidOfFilling(filled),
  },
];

let filled = null; // what happened in the last step

/** Say how much of a prompt was reused, and why not more if nothing was. */
export function saidOfReuse({ reused, replayed, computed, why }) {
  const all = reused + replayed + computed;
  if (!all) return "The server does not say what it reused.";
  if (!reused) return `Nothing was reused: all ${count(all, "token")} of the prompt were computed.${why ? ` The server says: ${why}` : ""}`;
  return `Of the prompt’s ${count(all, "token")} the model read ${computed}; ${reused} were reused${replayed ? `, and ${replayed} replayed` : ""}.`;
}

/** Say what filling has done. Full is a budget only if replies made room, or waited while nine tenths were in use. */
export function saidOfFilling({ peak, budget, nMadeRoom, nSwaps, nWaiting, nWhole, n }) {
  const said = [nWhole === n ? `All ${n} replies came.` : `${nWhole} of ${n} replies came.`];
  if (!budget) return said[0];
  const use = percent(peak, budget);
  if (nMadeRoom) said.unshift(`The budget was full: replies made room ${count(nMadeRoom, "time")}${nSwaps ? `, with ${count(nSwaps, "swap")}` : ""}, and went on later.`);
  else if (nWaiting && peak >= NEARLY_FULL * budget) said.unshift(`The budget was full, ${use} of it in use: up to ${count(nWaiting, "conversation")} waited.`);
  else said.push(`The budget was not full: at most ${use} of ${bytes(budget)} were in use. Start the server with a smaller --budget to see replies make room.`);
  return said.join(" ");
}

/** Let many conversations run at once; return what happened, by what the server counted before, meanwhile and after. */
async function fill() {
  const before = await api.memoryNow(), seen = { peak: before.bytes.used, nWaiting: 0 };
  const look = async () => {
    const now = await api.memoryNow();
    seen.peak = Math.max(seen.peak, now.bytes.used);
    seen.nWaiting = Math.max(seen.nWaiting, now.engine.waiting);
    return now;
  };
  let isDone = false;
  const watching = (async () => { while (!isDone) { await look().catch(() => {}); await new Promise((next) => setTimeout(next, 60)); } })();
  const talk_ = async (i) => {
    const input = Array.from({ length: 12 }, (_, j) => `My ${["cat", "dog", "horse"][j % 3]} is called ${["Milo", "Rex", "Nala", "Otis"][(i + j) % 4]}.`).join(" ");
    const request = { model: state.model, ...sampling(), input: `${i}: ${input} What is my cat called?`, store: false, stream: true, max_output_tokens: 120 };
    let isWhole = false;
    for await (const { data } of api.events("POST", "/v1/responses", request)) isWhole ||= data.type === "response.completed" || data.type === "response.incomplete";
    return isWhole;
  };
  const all = await Promise.allSettled(Array.from({ length: AT_ONCE }, (_, i) => talk_(i)));
  isDone = true;
  await watching;
  const failed = all.filter((one) => one.status === "rejected");
  if (failed.length === all.length) throw failed[0].reason;
  const after = await look(), swaps = ({ engine }) => engine.swaps.to_host + engine.swaps.to_disk;
  return {
    ...seen, budget: after.bytes.budget, nMadeRoom: after.engine.n_preempted - before.engine.n_preempted, nSwaps: swaps(after) - swaps(before),
    nWhole: all.filter((one) => one.value).length, n: AT_ONCE,
  };
}

/** Show the tour on the first visit, for the model that it is written for. */
export function offer() {
  if (state.model === "embedded" && !localStorage.getItem(SEEN) && !location.hash.slice(1)) begin();
}

export function begin() { step(0); }

function end() {
  localStorage.setItem(SEEN, "1");
  card?.remove();
  card = null;
}

function step(i) {
  card?.remove();
  const { title, text, verb, panel, act, after } = STEPS[i];
  showPanel(panel, { quietly: true });
  const said = h("p", { role: "status" }, text);
  const next = i + 1 < STEPS.length ? h("button", { type: "button", class: "primary", onclick: () => step(i + 1) }, "Next")
    : h("button", { type: "button", class: "primary", onclick: end }, "Done");
  const go = h("button", { type: "button", class: "primary", onclick: async () => {
    go.disabled = true;
    go.textContent = "One moment …";
    const settings = state.settings;
    set({ settings: { ...settings, temperature: "0", max_output_tokens: "40", instructions: "" } });
    const isDone = await talk.attempt(async () => { await act(); return true; });
    set({ settings });
    if (!isDone || state.trouble) { go.disabled = false; go.textContent = verb; return; }
    await new Promise((done) => setTimeout(done, 400));
    said.textContent = after();
    go.replaceWith(next);
    next.focus();
  } }, verb);
  card = h("section", { id: "tour", "aria-label": "Tour" },
    h("p", { class: "dots", "aria-hidden": "true" }, STEPS.map((_, j) => h("i", { class: j === i ? "here" : "" }))),
    h("h2", null, h("span", { class: "hidden" }, `Step ${i + 1} of ${STEPS.length}: `), title), said,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: end }, "Leave the tour"), go));
  $("app").append(card);
  go.focus({ preventScroll: true });
}
