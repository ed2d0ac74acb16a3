// Shows in five steps what the memory does, by doing it. It uses the page as a reader would.

import * as talk from "/page/conversation.js";
import * as api from "/page/api.js";
import * as memory from "/page/memory.js";
import { state, pathTo, isReply, set, sampling } from "/page/state.js";
import { $, h } from "/page/dom.js";
import { bytes, count } from "/page/format.js";
import { partsOf } from "/page/costs.js";
import { showPanel } from "/page/layout.js";

const SEEN = "hybrid-memory.tour";
const AT_ONCE = 24;
let card = null;

const lastReply = () => pathTo(state.head).findLast(isReply);
const firstOfUser = () => pathTo(state.head).find((node) => node.role === "user");

const STEPS = [
  {
    title: "Tell it a fact", panel: "tree", verb: "Tell it",
    text: "Say that your cat is called Milo, and ask. The model reads each token once; what it remembers stays in the memory on the right.",
    act: async () => { talk.startNew(); await talk.send("My cat is called Milo."); await talk.send("What is my cat called?"); },
    after: () => `It says: “${lastReply()?.text ?? "…"}”`,
  },
  {
    title: "Change the past", panel: "tree", verb: "Edit it",
    text: "Now your first message is edited: the cat is called Luna. In most engines the recurrent layers cannot go back, so they would read everything again.",
    act: async () => { const first = firstOfUser(); await talk.edit(first.id, "My cat is called Luna.", true); await talk.send("What is my cat called?"); },
    after: () => `It says: “${lastReply()?.text ?? "…"}” The conversation with Milo is still there: see the tree.`,
  },
  {
    title: "Branch", panel: "tree", verb: "Make a branch",
    text: "Go back to the reply before the question and ask something else. Both branches share what comes before.",
    act: async () => { const path = pathTo(state.head), reply = path.filter(isReply).at(-2) ?? path.find(isReply); await talk.goTo(reply.id); await talk.send("My dog is called Rex."); },
    after: () => "Each line of the tree is a branch. Beside it stands what going there would cost.",
  },
  {
    title: "See what was shared", panel: "memory", verb: "Show me",
    text: "The memory of the common beginning is held once, and the prompt of the branch was not read again.",
    act: async () => {},
    after: () => {
      const split = partsOf(state.lastUsage ?? {}), data = memory.snapshot();
      const shared = data ? ` ${bytes(data.bytes.shared)} of ${bytes(data.bytes.used)} are shared by several sequences.` : "";
      return `Of the last prompt ${count(split.reused, "token")} were reused and ${split.computed} computed.${shared}`;
    },
  },
  {
    title: "Fill the memory", panel: "memory", verb: `Start ${AT_ONCE} replies`,
    text: `${AT_ONCE} conversations at once. When the budget is full, conversations wait for room or are swapped out, and come back as they were.`,
    act: fill,
    after: () => {
      const data = memory.snapshot();
      if (!data) return "They have all ended.";
      const { swaps, n_preempted: n } = data.engine, moved = swaps.to_host + swaps.to_disk;
      if (moved + n) return `It was full: ${count(moved, "swap")} so far, and every reply is whole.`;
      return mostWaiting ? `It was full: ${count(mostWaiting, "conversation")} waited for room, and every reply is whole.`
        : `They fit: ${bytes(data.bytes.used)} of ${bytes(data.bytes.budget)}. Start the server with --budget 4MiB to see them swapped.`;
    },
  },
];

let mostWaiting = 0; // conversations at once, of those that the last step of the tour began

async function fill() {
  mostWaiting = 0;
  const watching = setInterval(() => { mostWaiting = Math.max(mostWaiting, memory.snapshot()?.engine.waiting ?? 0); }, 100);
  const talk_ = async (i) => {
    const input = Array.from({ length: 12 }, (_, j) => `My ${["cat", "dog", "horse"][j % 3]} is called ${["Milo", "Rex", "Nala", "Otis"][(i + j) % 4]}.`).join(" ");
    const request = { model: state.model, ...sampling(), input: `${i}: ${input} What is my cat called?`, store: false, stream: true, max_output_tokens: 120 };
    for await (const _ of api.events("POST", "/v1/responses", request)) { /* only the memory is looked at */ }
  };
  const all = await Promise.allSettled(Array.from({ length: AT_ONCE }, (_, i) => talk_(i)));
  clearInterval(watching);
  const failed = all.filter((one) => one.status === "rejected");
  if (failed.length === all.length) throw failed[0].reason;
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
