// Holds what the page shows: the list of conversations, the tree of the chosen one, and the reply in progress.

/**
 * sessions, hasMore, search: the list. session: id of the chosen one, null for a new one. title, head: of it.
 * nodes: Map of its messages by id, parents first. reply: the one in progress. usages: Map of reply -> its usage.
 */
export const state = {
  model: null, sessions: [], hasMore: false, search: "", session: null, title: "", head: null, nodes: new Map(),
  reply: null, trouble: null, usages: new Map(), online: true, settings: loadSettings(),
};

const listeners = new Set();
let queued = false;

export function subscribe(listener) { listeners.add(listener); }

/** Change the state; listeners hear of it once, in the next frame: a fast reply brings many tokens in one. */
export function set(patch) {
  Object.assign(state, patch);
  if (queued) return;
  queued = true;
  (document.hidden ? (tell) => setTimeout(tell, 100) : requestAnimationFrame)(() => {
    queued = false;
    for (const listener of listeners) listener(state);
  });
}

/** Return the nodes from the first message to this one. */
export function pathTo(id, nodes = state.nodes) {
  const path = [];
  for (let node = nodes.get(id); node; node = nodes.get(node.parent)) path.push(node);
  return path.reverse();
}

const families = new WeakMap(); // nodes -> Map of parent -> its children: a tree may have thousands

/** Return the nodes with this parent, the oldest first. */
export function childrenOf(parent, nodes = state.nodes) {
  if (!families.has(nodes)) families.set(nodes, Map.groupBy(nodes.values(), (node) => node.parent ?? null));
  return families.get(nodes).get(parent ?? null) ?? [];
}

/** Return the end of the newest branch below a node. */
export function leafOf(id) {
  for (;;) {
    const below = childrenOf(id);
    if (!below.length) return id;
    id = below.at(-1).id;
  }
}

export const isReply = (node) => node?.id.startsWith("resp_");

function loadSettings() {
  const given = { instructions: "", temperature: "0.7", top_p: "1", max_output_tokens: "", seed: "" };
  try { return { ...given, ...JSON.parse(localStorage.getItem("hybrid-memory.settings") ?? "{}") }; } catch { return given; }
}

export function saveSettings(settings) {
  localStorage.setItem("hybrid-memory.settings", JSON.stringify(settings));
  set({ settings });
}

/** Return the settings as fields of a request. Empty settings are left out, so that the server chooses. */
export function sampling() {
  const { instructions, ...numbers } = state.settings;
  const given = Object.entries(numbers).filter(([, text]) => text !== "").map(([name, text]) => [name, Number(text)]);
  return { ...Object.fromEntries(given), ...(instructions.trim() && { instructions }) };
}
