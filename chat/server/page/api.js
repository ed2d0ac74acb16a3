// Speaks the server's public HTTP API: requests, streams of events, and errors in words.

const KEY = "hybrid-memory.key", CLIENT = "hybrid-memory.client";

/** Says what went wrong, in words for the user of the page. `status` 0: the server did not answer. */
export class ApiError extends Error {
  constructor(status, message, { code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  /** True if the same request may succeed later. */
  get mayRetry() { return [0, 408, 429, 500, 502, 503, 504].includes(this.status); }
}

let askForKey = async () => null;
let asking = null;

/** Set the function that asks for the key; it returns `{key, remember}`, or null. */
export function onKeyNeeded(ask) { askForKey = ask; }

function key() { return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY); }

export function forgetKey() { sessionStorage.removeItem(KEY); localStorage.removeItem(KEY); }

export const hasKey = () => key() !== null;

async function renewKey(wrong) {
  if (key() !== wrong) return true; // another request has asked meanwhile
  asking ??= askForKey(wrong !== null).finally(() => { asking = null; });
  const given = await asking;
  if (!given) return false;
  forgetKey();
  (given.remember ? localStorage : sessionStorage).setItem(KEY, given.key);
  return true;
}

// In a fleet, each replica has a memory of its own. The router takes all requests of one browser for one session, so that
// one replica answers them while it has room. Requests that only read go to the replica that answered last.

let replica = null;
let onReplica = () => {};

/** Return the name of the replica that answered last; null where there is one server. */
export const replicaName = () => replica;

/** Set the function that is called when another replica answers than before. */
export function onReplicaChange(call) { onReplica = call; }

function client() {
  let name = localStorage.getItem(CLIENT);
  if (!name) {
    name = [...crypto.getRandomValues(new Uint32Array(3))].map((n) => n.toString(36)).join("");
    localStorage.setItem(CLIENT, name);
  }
  return name;
}

function routing(method) {
  return { "x-session-id": client(), ...(method === "GET" && replica && { "x-hybrid-memory-replica": replica }) };
}

function noteReplica(response) {
  const found = /replica=([^;\s]+)/.exec(response.headers.get("x-hybrid-memory-route") ?? "")?.[1] ?? null;
  if (found === null || found === replica) return;
  replica = found;
  onReplica();
}

async function errorOf(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* no JSON: a proxy has answered */ }
  const said = error.message ?? `The server answered ${response.status}.`;
  const words = {
    401: "This server wants an API key.",
    413: `This is too long. ${said}`,
    429: `The server is busy. ${said}`,
    503: `The server cannot do this now. ${said}`,
  };
  return new ApiError(response.status, words[response.status] ?? said, { code: error.code, retryAfter });
}

/** Send a request; returns the response, or raises ApiError. It asks the user for a key if the server wants one. */
async function send(method, path, body, { signal, quiet } = {}) {
  for (;;) {
    const used = key();
    const headers = { ...routing(method), ...(body !== undefined && { "Content-Type": "application/json" }), ...(used && { Authorization: `Bearer ${used}` }) };
    let response;
    try {
      response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server does not answer. Is it still running?");
    }
    noteReplica(response);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || quiet || !(await renewKey(used))) throw error;
  }
}

/** Send a request, and return the JSON of the response. */
export async function call(method, path, body, options) {
  return (await send(method, path, body, options)).json();
}

/** Send a request, and yield the events of the response, each as `{event, data}`. */
export async function* events(method, path, body, options) {
  const response = await send(method, path, body, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").filter((line) => !line.startsWith(":")).map((line) => {
          const at = line.indexOf(":");
          return [line.slice(0, at), line.slice(at + 1).trimStart()];
        }));
        if (!fields.data || fields.data === "[DONE]") continue;
        const data = JSON.parse(fields.data);
        if (data.error && !data.type && !fields.event) throw new ApiError(503, data.error.message, { code: data.error.code }); // a gateway has lost its replica
        yield { event: fields.event ?? "message", data };
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError || error instanceof SyntaxError) throw error;
    throw new ApiError(0, "The connection to the server broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Sessions: see docs/how-to/sessions.md

const at = (session, rest = "") => `/v1/sessions/${encodeURIComponent(session)}${rest}`;
const node = (id) => `/nodes/${encodeURIComponent(id)}`;

export const models = () => call("GET", "/v1/models");
export const listSessions = (search, after) => call("GET", `/v1/sessions?${new URLSearchParams({ limit: "50", ...(search && { search }), ...(after && { after }) })}`);
export const getTree = (session) => call("GET", at(session, "/tree"));
export const getResponse = (id) => call("GET", `/v1/responses/${encodeURIComponent(id)}`);
export const rename = (session, title) => call("POST", at(session), { title });
export const removeSession = (session) => call("DELETE", at(session));
export const setHead = (session, id) => call("POST", at(session, "/head"), { node: id });
export const removeNode = (session, id) => call("DELETE", at(session, node(id)));
export const pin = (session, id) => call("POST", at(session, `${node(id)}/pin`), {});
export const unpin = (session, id) => call("DELETE", at(session, `${node(id)}/pin`));
export const fork = (session, id, options) => call("POST", at(session, "/fork"), { node: id, ...options });
export const exportSession = (session) => call("GET", at(session, "/export"));
export const importSession = (file) => call("POST", "/v1/sessions/import", file);
export const editNode = (session, id, content) => call("POST", at(session, "/edit"), { node: id, content, answer: false });
export const addItems = (session, items) => call("POST", `/v1/conversations/${encodeURIComponent(session)}/items`, { items });
export const tokenize = (text) => call("POST", "/tokenize", { content: text });
export const detokenize = (tokens) => call("POST", "/detokenize", { tokens });
export const memoryNow = () => call("GET", "/v1/memory");
export const memoryEvents = (sequence, signal) => events("GET", `/v1/memory/events?sequence=${sequence}`, undefined, { signal, quiet: true });
