// Starts the page, and joins its parts.

import * as api from "/page/api.js";
import * as talk from "/page/conversation.js";
import * as messages from "/page/messages.js";
import * as tree from "/page/tree.js";
import * as memory from "/page/memory.js";
import * as layout from "/page/layout.js";
import * as suggestions from "/page/suggestions.js";
import * as tips from "/page/tips.js";
import * as tour from "/page/tour.js";
import { askKey, askName, openSettings } from "/page/settings.js";
import { state, set, subscribe } from "/page/state.js";
import { $, h, dress, iconButton, confirmed, toast } from "/page/dom.js";
import { ago, count } from "/page/format.js";

const act = (action) => () => talk.attempt(action);

function dressUp() {
  dress("new-chat", "plus").append("New conversation");
  dress("open-sidebar", "menu"); dress("close-sidebar", "close");
  dress("open-inspector", "panel"); dress("close-inspector", "close");
  dress("undo", "undo", "Undo: back to where the conversation was");
  dress("redo", "redo", "Redo");
  dress("export", "save", "Export this conversation as JSON");
  dress("send", "send"); dress("stop", "stop");
}

// The list of conversations

function drawList() {
  const list = $("sessions");
  list.replaceChildren(...state.sessions.map((session) => {
    const title = session.title || "Untitled", isOpen = session.id === state.session;
    return h("li", { class: isOpen ? "open" : "" },
      h("button", { type: "button", class: "session", "aria-current": isOpen ? "page" : null, onclick: act(async () => { layout.closeAll(); await talk.open(session.id); messages.follow(); }) },
        h("bdi", { class: "name" }, title), h("span", { class: "quiet" }, [ago(session.updated_at), count(session.n_nodes, "message"), session.pinned ? "pinned" : ""].filter(Boolean).join(" · "))),
      h("span", { class: "session-tools" },
        iconButton("rename", `Rename ${title}`, act(async () => {
          const name = await askName(session.title);
          if (name === null) return;
          await api.rename(session.id, name);
          if (isOpen) set({ title: name });
          await talk.refreshList();
        })),
        iconButton("bin", `Delete ${title}`, act(async () => {
          if (!(await confirmed("Delete this conversation?", `“${title}” and all of its branches are gone for good.`, "Delete"))) return;
          await api.removeSession(session.id);
          if (isOpen) talk.startNew();
          await talk.refreshList();
        }))));
  }));
  if (state.hasMore) list.append(h("li", null, h("button", { type: "button", class: "quiet-button", onclick: act(() => talk.refreshList(true)) }, "Show more")));
  $("no-sessions").hidden = state.sessions.length > 0;
  $("no-sessions").textContent = state.search ? "None says that." : "What you say is kept here, by the server.";
}

function drawTop() {
  $("title").textContent = state.title || "New conversation";
  document.title = state.title ? `${state.title} · hybrid-memory` : "hybrid-memory";
  $("model").hidden = !state.model;
  $("model").textContent = state.model ?? "";
  $("undo").disabled = state.session === null || talk.undoTarget() === null;
  $("redo").disabled = talk.redoTarget() === null;
  $("export").disabled = state.session === null;
  const isBusy = state.reply !== null && !state.reply.isOver;
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("send").disabled = !$("text").value.trim();
}

let listed = null;
function draw() {
  drawTop();
  const is = [state.sessions, state.session, state.search, state.hasMore];
  if (!listed || is.some((value, i) => value !== listed[i])) { listed = is; drawList(); }
}

// The composer

function grow() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight, 220)}px`;
  $("send").disabled = !box.value.trim();
}

function submit() {
  const box = $("text"), text = box.value.trim();
  if (!text || (state.reply && !state.reply.isOver)) return;
  box.value = "";
  grow();
  messages.follow();
  talk.attempt(() => talk.send(text));
}

function startComposer() {
  $("text").addEventListener("input", grow);
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("stop").addEventListener("click", () => talk.stop());
}

// Files

async function download() {
  const written = await api.exportSession(state.session);
  const name = (state.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
  const url = URL.createObjectURL(new Blob([JSON.stringify(written, null, 1)], { type: "application/json" }));
  h("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function upload(file) {
  let written;
  try { written = JSON.parse(await file.text()); } catch { toast(`${file.name} is no JSON; choose a file that this page has exported.`); return; }
  const made = await api.importSession(written);
  await talk.refreshList();
  await talk.open(made.id);
}

const suggestion = (text) => h("button", { type: "button", class: "suggestion", onclick: () => { $("text").value = text; grow(); submit(); } }, text);

function greeting() {
  const isEmbedded = state.model === "embedded";
  return h("div", { class: "welcome" }, h("h2", null, "Talk, change your mind, go back"),
    h("p", null, "Every message can be edited, answered again or branched from, and nothing that was computed is lost. The tree shows each way; the memory shows what it takes."),
    isEmbedded ? h("div", { class: "suggestions" }, ...suggestions.beginnings().map(suggestion)) : "",
    isEmbedded ? h("p", { class: "quiet" }, suggestions.ABOUT) : "");
}

/** Questions that the embedded model can answer now, below its newest reply. */
function furtherQuestions(path) {
  const texts = state.model === "embedded" ? suggestions.questions(path.filter((node) => node.role === "user").map((node) => node.text)) : [];
  return texts.length ? h("div", { class: "suggestions" }, ...texts.map(suggestion)) : null;
}

function keys(event) {
  const isCommand = event.ctrlKey || event.metaKey, inText = event.target.matches?.("input, textarea");
  if (isCommand && event.key === "k") { event.preventDefault(); $("search").focus(); }
  if (isCommand && !inText && event.key === "z") { event.preventDefault(); talk.attempt(event.shiftKey ? talk.redo : talk.undo); }
}

/** Ask again now and then while the server does not answer, and say so. */
async function keepConnected() {
  for (let wait = 1000; ; wait = Math.min(8000, wait * 2)) {
    try {
      const { data } = await api.models();
      set({ model: data[0].id });
      await talk.refreshList();
      $("banner").hidden = true;
      return;
    } catch (error) {
      $("banner").hidden = false;
      $("banner").textContent = error.status === 401 ? "The key is missing; reload the page to enter it." : `${error.message} Trying again …`;
      if (error.status === 401) return;
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function start() {
  api.onKeyNeeded(askKey);
  dressUp();
  messages.onEmpty(greeting);
  messages.onReply(furtherQuestions);
  messages.start(); tree.start(); tips.start(); startComposer(); layout.start();
  subscribe(draw);
  $("new-chat").addEventListener("click", () => { layout.closeAll(); talk.startNew(); $("text").focus(); });
  $("undo").addEventListener("click", act(talk.undo));
  $("redo").addEventListener("click", act(talk.redo));
  $("export").addEventListener("click", act(download));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", (event) => { const [file] = event.target.files; event.target.value = ""; if (file) talk.attempt(() => upload(file)); });
  $("open-settings").addEventListener("click", openSettings);
  $("open-tour").addEventListener("click", () => { layout.closeAll(); tour.begin(); });
  let typing = 0;
  $("search").addEventListener("input", (event) => { clearTimeout(typing); typing = setTimeout(() => { set({ search: event.target.value.trim() }); talk.attempt(() => talk.refreshList()); }, 200); });
  document.addEventListener("keydown", keys);
  window.addEventListener("focus", () => { if (!state.reply) Promise.all([talk.refreshList(), talk.refresh()]).catch(() => {}); });
  set({});
  const wanted = location.hash.slice(1);
  await keepConnected();
  if (wanted) {
    try { await talk.reopen(wanted); messages.follow(); } catch (error) {
      talk.startNew();
      if (error.status !== 404) toast(error.message);
    }
  }
  memory.start();
  tour.offer();
  if (matchMedia("(hover: hover)").matches && !$("tour")) $("text").focus({ preventScroll: true });
}

start();
