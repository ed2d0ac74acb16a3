// Shows the current path as messages, each with buttons for its actions.

import * as api from "/page/api.js";
import * as talk from "/page/conversation.js";
import { state, set, subscribe, pathTo, isReply, leafOf } from "/page/state.js";
import { $, h, icon, iconButton, confirmed, ask, leave, toast, copyText } from "/page/dom.js";
import { show } from "/page/markdown.js";
import { count } from "/page/format.js";
import { spent } from "/page/costs.js";

const made = new Map(); // key -> {element, is}
const AT_ONCE = 60;
let editing = null;
let sticks = true;
let most = AT_ONCE; // messages that are shown: of thousands the newest, until more are asked for
let shownSession = null;
let greeting = () => null;
let further = () => null;

/** Set the content that is shown while there is no message yet. */
export function onEmpty(make) { greeting = make; }

/** Set what is shown below the newest reply: an element for the path that ends in it, or null. */
export function onReply(make) { further = make; }

export function start() {
  const scroll = $("scroll");
  scroll.addEventListener("scroll", () => { sticks = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60; }, { passive: true });
  subscribe(draw);
}

function draw() {
  const path = pathTo(state.head), { reply } = state;
  const keep = reply ? pathTo(reply.parent).length : path.length;
  if (state.session !== shownSession) { shownSession = state.session; most = AT_ONCE; }
  const first = Math.max(0, keep - most);
  const shown = path.slice(first, keep).map((node) => keyed(node.id, signature(node), () => message(node)));
  if (first) shown.unshift(keyed("earlier", first, () => earlier(first)));
  if (reply) {
    if (reply.question !== null) shown.push(keyed("question", reply.question, () => bubble("user", reply.question)));
    if (reply.text || !reply.isOver) shown.push(growing(reply));
  } else if (path.length && path.at(-1).role === "user") {
    shown.push(keyed("answer", path.at(-1).id, () => h("p", { class: "offer" },
      h("button", { type: "button", class: "primary", onclick: () => talk.attempt(() => talk.answer(path.at(-1).id)) }, "Answer this"))));
  } else if (path.length && isReply(path.at(-1)) && editing === null) {
    const more = further(path);
    if (more) shown.push(keyed("further", more.textContent, () => more));
  }
  if (state.trouble) shown.push(keyed("trouble", state.trouble, () => trouble(state.trouble)));
  if (!shown.length) shown.push(keyed("empty", state.model, () => greeting()));
  const box = $("messages");
  for (const key of made.keys()) if (!shown.includes(made.get(key).element)) made.delete(key);
  shown.forEach((element, i) => { if (box.children[i] !== element) box.insertBefore(element, box.children[i] ?? null); });
  while (box.children.length > shown.length) box.lastChild.remove();
  $("scroll").classList.toggle("is-empty", !path.length && !reply);
  if (sticks) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function earlier(n) {
  const show = () => {
    const scroll = $("scroll"), fromEnd = scroll.scrollHeight - scroll.scrollTop;
    most += AT_ONCE;
    sticks = false;
    draw();
    scroll.scrollTop = scroll.scrollHeight - fromEnd; // what was read stays where it was
    $("messages").querySelector(".earlier button")?.focus({ preventScroll: true });
  };
  return h("p", { class: "offer earlier" }, h("button", { type: "button", onclick: show }, `Show earlier messages: there are ${count(n, "more", "more")}`));
}

/** Scroll to the end, and stay there while a reply grows. */
export function follow() {
  sticks = true;
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function keyed(key, is, make) {
  const old = made.get(key);
  if (old && old.is === is) return old.element;
  const element = make();
  made.set(key, { element, is });
  return element;
}

function signature(node) {
  const siblings = talk.siblingsOf(node);
  return [node.text, node.status, node.pinned, siblings.indexOf(node), siblings.length, editing === node.id, Boolean(state.usages.get(node.id))].join("\u0000");
}

function bubble(role, text) {
  const body = h("div", { class: "text", dir: "auto" });
  if (role === "assistant") show(body, text);
  else body.append(text);
  return h("article", { class: `message ${role}`, "aria-label": role === "assistant" ? "Reply" : "You" }, body);
}

function message(node) {
  if (editing === node.id) return editor(node);
  const role = node.role === "assistant" ? "assistant" : node.role === "user" ? "user" : "system";
  const element = bubble(role, node.text);
  element.id = `m-${node.id}`;
  if (role === "system") element.prepend(h("p", { class: "role" }, node.role));
  if (node.status === "incomplete") element.append(h("p", { class: "note" }, "This reply was stopped, or cut at its greatest length."));
  const usage = state.usages.get(node.id);
  if (usage) element.append(spent(usage));
  element.append(toolbar(node));
  return element;
}

function growing(reply) {
  const element = keyed("reply", reply, () => {
    const body = h("div", { class: "text", dir: "auto" });
    return h("article", { class: "message assistant growing", "aria-label": "Reply in progress", "aria-busy": "true" },
      body, h("p", { class: "progress", role: "status" }));
  });
  show(element.firstChild, reply.text);
  element.classList.toggle("waiting", !reply.text && !reply.isOver);
  const { progress } = reply;
  const words = reply.isOver || reply.text ? "" : progress?.total
    ? `Reading the prompt: ${count(progress.processed ?? progress.cache ?? 0, "token")} of ${progress.total}` : "Waiting for the first token";
  if (element.lastChild.textContent !== words) element.lastChild.textContent = words;
  return element;
}

function toolbar(node) {
  const act = (action) => () => talk.attempt(action);
  const siblings = talk.siblingsOf(node), at = siblings.indexOf(node);
  const jump = (step) => act(() => talk.goTo(leafOf(siblings[at + step].id)));
  const parts = [];
  if (siblings.length > 1) {
    parts.push(h("span", { class: "siblings" },
      iconButton("left", "The version before", jump(-1), { disabled: at === 0 }),
      h("span", { "aria-label": `Version ${at + 1} of ${siblings.length}` }, `${at + 1}/${siblings.length}`),
      iconButton("right", "The next version", jump(1), { disabled: at === siblings.length - 1 })));
  }
  parts.push(iconButton("copy", "Copy", async () => { await copyText(node.text); toast("Copied"); }));
  parts.push(iconButton("edit", "Edit: the old version stays", () => { editing = node.id; set({}); }));
  if (node.role === "assistant") {
    parts.push(iconButton("again", "Another reply beside this one", act(() => talk.regenerate(node.id))));
    if (isReply(node) && node.n_tokens > 1) parts.push(iconButton("knife", "Go on from a word of this reply", act(() => fromToken(node))));
  }
  parts.push(iconButton("branch", "A conversation of its own from here", act(() => talk.forkTo(node.id))));
  if (isReply(node)) {
    parts.push(iconButton("pin", node.pinned ? "Unpin: its memory may make room" : "Pin: keep its memory", act(() => talk.togglePin(node)), { "aria-pressed": String(node.pinned) }));
  }
  parts.push(iconButton("bin", "Delete this message and what follows", act(async () => {
    if (await confirmed("Delete this branch?", "This message and all that follows it is gone for good. Other branches stay.", "Delete")) await talk.removeBranch(node.id);
  })));
  return h("div", { class: "tools", role: "toolbar", "aria-label": "This message" }, parts);
}

function editor(node) {
  const text = h("textarea", { class: "edit", "aria-label": "The new text", rows: "3" });
  text.value = node.text;
  const close = () => { editing = null; set({}); };
  const save = (answers) => { const value = text.value; close(); talk.attempt(() => talk.edit(node.id, value, answers)); };
  const keys = (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(node.role === "user");
  };
  text.addEventListener("keydown", keys);
  requestAnimationFrame(() => text.focus());
  return h("article", { class: "message editing", "aria-label": "Edit" }, text,
    h("div", { class: "buttons" },
      h("button", { type: "button", onclick: close }, "Cancel"),
      h("button", { type: "button", onclick: () => save(false) }, "Save only"),
      node.role === "user" && h("button", { type: "button", class: "primary", onclick: () => save(true) }, "Save and answer")));
}

/** Ask after which token of a reply to continue. Tokens are the model's pieces of words. */
async function fromToken(node) {
  const { tokens } = await api.tokenize(node.text);
  const before = h("span"), after = h("span", { class: "cut" }), said = h("output");
  const range = h("input", { type: "range", min: "1", max: String(Math.max(1, tokens.length - 1)), value: String(Math.ceil(tokens.length / 2)), autofocus: true, "aria-label": "Tokens to keep" });
  const draw = async () => {
    const n = Number(range.value), read = await api.detokenize(tokens.slice(0, n));
    if (n !== Number(range.value)) return; // the mark has moved on
    const kept = read.prompt ?? read.content ?? "";
    before.textContent = kept;
    after.textContent = node.text.startsWith(kept) ? node.text.slice(kept.length) : "";
    said.textContent = `${count(n, "token")} of ${tokens.length} stay`;
  };
  range.addEventListener("input", () => talk.attempt(draw));
  await draw();
  const chosen = await ask("Go on from here", [
    h("p", { class: "quiet" }, "The reply up to the mark stays, and the model goes on from there in a new branch."),
    h("div", { class: "cut-text", dir: "auto", tabindex: "0" }, before, after), range, h("p", null, said),
  ], [leave(), h("button", { value: "yes", class: "primary" }, "Go on")]);
  if (chosen === "yes") await talk.branchAt(node.id, Number(range.value));
}

function trouble({ message: words, again, mayRetry, isGone, question }) {
  return h("div", { class: "trouble", role: "alert" }, h("p", null, words),
    h("div", { class: "buttons" },
      mayRetry && h("button", { type: "button", class: "primary", onclick: () => talk.attempt(again) }, "Try again"),
      isGone && question && h("button", { type: "button", class: "primary", onclick: () => { talk.startNew(); talk.attempt(() => talk.send(question)); } }, "Say it in a new conversation"),
      h("button", { type: "button", onclick: () => {
        const question = talk.dismiss();
        if (question && !$("text").value) $("text").value = question;
        $("text").focus();
      } }, "Edit the message")));
}
