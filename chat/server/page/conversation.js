// Changes conversations. Each change is made on the server first; then the conversation's tree is read again.

import * as api from "/page/api.js";
import { state, set, pathTo, childrenOf, isReply, sampling } from "/page/state.js";
import { toast } from "/page/dom.js";

const past = { undo: [], redo: [] };
let abort = null;
const MOST_USAGES = 12;
const PENDING = "hybrid-memory.pending", GONE = ["not_found", "previous_response_not_found"];

/** Run an action. If it fails, show the error in words and return undefined. */
export async function attempt(action, retry) {
  try {
    return await action();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    if (!(error instanceof api.ApiError)) console.error(error);
    toast(error.message, error.mayRetry && retry ? "Try again" : null, retry);
    return undefined;
  }
}

// The list

export async function refreshList(more = false) {
  const found = await api.listSessions(state.search, more ? state.sessions.at(-1)?.id : null);
  set({ sessions: more ? [...state.sessions, ...found.data] : found.data, hasMore: found.has_more });
}

export function startNew() {
  stop();
  past.undo = []; past.redo = [];
  history.replaceState(null, "", "#");
  set({ session: null, title: "", head: null, nodes: new Map(), reply: null, trouble: null });
}

export async function open(session) {
  if (session !== state.session) stop();
  const { session: before, reply: replyBefore, trouble } = state;
  set({ session, reply: null, trouble: null });
  try {
    await refresh();
  } catch (error) { // it was deleted elsewhere, or the server is away: what was open stays
    if (state.session === session) set({ session: before, reply: replyBefore, trouble });
    refreshList().catch(() => {});
    throw error;
  }
  past.undo = []; past.redo = [];
  history.replaceState(null, "", `#${session}`);
}

let reading = null; // the newest reading of the tree: an older one may end later, with what was true before

/** Read the tree of the chosen conversation again. */
export async function refresh() {
  const own = reading = readTree(() => reading === own);
  await own;
  if (reading !== own) await reading;
}

async function readTree(isNewest) {
  const session = state.session;
  if (session === null) return;
  const tree = await api.getTree(session);
  if (state.session !== session || !isNewest()) return;
  const nodes = new Map(tree.nodes.map((node) => [node.id, node]));
  set({ title: tree.title, head: tree.head, nodes });
  readUsages().catch(() => {});
}

/** Read the costs of the newest replies of the path, from their responses, because the tree does not hold them. */
async function readUsages() {
  const missing = pathTo(state.head).filter((node) => isReply(node) && !state.usages.has(node.id)).slice(-MOST_USAGES);
  for (const { id } of missing.reverse()) {
    const { usage } = await api.getResponse(id);
    state.usages.set(id, usage ?? null);
    if (usage && id === state.head && !state.lastUsage) state.lastUsage = usage;
    set({});
  }
}

// Going places

function remember(head) {
  if (head === null) return;
  past.undo.push(head);
  past.redo = [];
}

/** Make a node the end of the current path. */
export async function goTo(id) {
  if (id === state.head) return;
  remember(state.head);
  await move(id);
}

async function move(id) {
  stop();
  await api.setHead(state.session, id);
  set({ head: id, trouble: null });
  await refresh();
}

/** Return the node to which undo leads: the previous head, or if there is none, the reply before the last turn. */
export function undoTarget() {
  const known = past.undo.findLast((id) => state.nodes.has(id) && id !== state.head);
  if (known) return known;
  const turns = pathTo(state.head).filter((node) => node.role === "user");
  return turns.at(-1)?.parent ?? null;
}

export const redoTarget = () => past.redo.findLast((id) => state.nodes.has(id)) ?? null;

export async function undo() {
  const target = undoTarget();
  if (target === null) return;
  const at = past.undo.lastIndexOf(target);
  if (at >= 0) past.undo.length = at;
  past.redo.push(state.head);
  await move(target);
}

export async function redo() {
  const target = redoTarget();
  if (target === null) return;
  past.redo.length = past.redo.lastIndexOf(target);
  past.undo.push(state.head);
  await move(target);
}

// Replies

export function stop() {
  abort?.abort();
  abort = null;
}

/** Send a message after the end of the current path. */
export async function send(text) {
  const head = state.nodes.get(state.head);
  remember(state.head);
  if (head && !isReply(head)) { // somebody has written it: it is no response that one can continue
    const item = { role: "user", content: text };
    await api.addItems(state.session, [item]);
    await refresh();
    await reply("/v1/responses", { conversation: state.session, store: true }, { parent: state.head });
    return;
  }
  const place = head ? { previous_response_id: head.id } : {};
  await reply("/v1/responses", { input: text, ...place, store: true }, { parent: state.head, question: text });
}

/** Let the model answer a message of the user that has no reply yet. */
export async function answer(id) {
  if (id !== state.head) await goTo(id);
  await reply("/v1/responses", { conversation: state.session, store: true }, { parent: id });
}

/** Make an alternative to a reply. */
export async function regenerate(id) {
  remember(state.head);
  await reply(`/v1/sessions/${state.session}/regenerate`, { node: id }, { parent: state.nodes.get(id).parent });
}

/** Add an edited copy of a message as a sibling, and let the model answer it if `answers`. */
export async function edit(id, text, answers) {
  remember(state.head);
  const node = state.nodes.get(id);
  if (answers) {
    await reply(`/v1/sessions/${state.session}/edit`, { node: id, content: text, answer: true }, { parent: node.parent, question: text });
    return;
  }
  await api.editNode(state.session, id, text);
  await refresh();
}

/** Make a reply that begins with the first `token` tokens of another, and goes on from there. */
export async function branchAt(id, token) {
  remember(state.head);
  await reply(`/v1/sessions/${state.session}/fork`, { node: id, token, answer: true }, { parent: state.nodes.get(id).parent });
}

async function reply(path, body, { parent, question = null }) {
  stop();
  const mine = new AbortController();
  abort = mine;
  const started = performance.now(), n = state.nodes.size;
  sessionStorage.setItem(PENDING, String(n));
  const shown = { parent, question, text: "", n: 0, progress: null, started, isOver: false };
  set({ reply: shown, trouble: null });
  const isMine = () => state.reply === shown;
  try {
    if (state.model === null) set({ model: (await api.models()).data[0].id }); // who writes fast is not refused
    const request = { model: state.model, ...sampling(), ...body, stream: true };
    for await (const { data } of api.events("POST", path, request, { signal: mine.signal })) {
      if (isMine()) hear(shown, data);
    }
    if (isMine()) await settle(shown);
  } catch (error) {
    if (!isMine()) return;
    const wasStopped = error.name === "AbortError";
    const isGone = GONE.includes(error.code);
    const message = isGone ? "The server no longer has this conversation: it was deleted elsewhere, or the server was started again and keeps none." : error.message;
    if (!wasStopped) set({ trouble: { message, isGone, question, again: () => reply(path, body, { parent, question }), mayRetry: error.mayRetry ?? false } });
    shown.isOver = true;
    set({ reply: shown });
    if (wasStopped && (await untilStored(n)) && isMine()) set({ reply: null });
  } finally {
    if (isMine() || state.reply === null) sessionStorage.removeItem(PENDING);
    if (abort === mine) abort = null;
    refreshList().catch(() => {});
  }
}

function hear(shown, data) {
  if (data.type === "response.output_text.delta") {
    shown.text += data.delta;
    shown.n += 1;
  } else if (data.type === "response.failed" || data.type === "error") {
    const said = data.response?.error ?? data.error ?? data;
    throw new api.ApiError(said.code === "rate_limit_exceeded" ? 429 : 500, said.message ?? "The reply failed.", { code: said.code });
  } else if (data.response) {
    const { id, status, usage, hybrid_memory: about } = data.response;
    if (about?.session && state.session === null) {
      history.replaceState(null, "", `#${about.session}`);
      set({ session: about.session });
    }
    if (usage) {
      state.usages.set(id, { ...usage, seconds: (performance.now() - shown.started) / 1000 });
      set({ lastUsage: usage });
    }
    if (status === "completed" || status === "incomplete") shown.isOver = true;
  } else if (data.type?.includes("progress")) {
    shown.progress = data;
  }
  set({ reply: shown });
}

/** Read the tree until it has more than `n` nodes: the server stores a reply that was left soon after. */
async function untilStored(n) {
  const { session } = state;
  for (const wait of [60, 120, 250, 500, 1000, 2000]) {
    await new Promise((done) => setTimeout(done, wait));
    if (state.session !== session) return false;
    await refresh().catch(() => {});
    if (state.nodes.size > n) return true;
  }
  return false;
}

/** Open a conversation when the page is loaded: perhaps in the middle of a reply, which is stored in a moment. */
export async function reopen(session) {
  const n = sessionStorage.getItem(PENDING);
  sessionStorage.removeItem(PENDING);
  try {
    await open(session);
  } catch (error) {
    if (error.status !== 404 || n === null) throw error;
  }
  if (n !== null && state.nodes.size <= Number(n)) await untilStored(Number(n));
  if (!state.nodes.size) startNew();
}

/** Show what the server has stored in place of what was streamed. */
async function settle(shown) {
  shown.isOver = true;
  await refresh();
  if (state.reply === shown) set({ reply: null });
}

/** Forget a reply that failed, and give back its question. */
export function dismiss() {
  const { reply: shown } = state;
  set({ reply: null, trouble: null, ...(!state.nodes.size && { session: null }) });
  return shown?.question ?? "";
}

// Branches, pins, files

export async function removeBranch(id) {
  stop();
  await api.removeNode(state.session, id);
  await refresh();
}

export async function togglePin(node) {
  await (node.pinned ? api.unpin : api.pin)(state.session, node.id);
  await refresh();
}

/** Copy the path to a node into a conversation of its own, and open it. */
export async function forkTo(id) {
  const made = await api.fork(state.session, id, { title: `${state.title || "Conversation"} (branch)` });
  await refreshList();
  await open(made.id);
}

/** Return the siblings of a node, itself included. */
export const siblingsOf = (node) => childrenOf(node.parent).filter((other) => other.role === node.role);
