// Turns markdown into elements. marked only splits the text; elements are made here, so HTML stays text.

import { lexer } from "/page/marked.js";
import { copyText, h, icon } from "/page/dom.js";

const SAFE = /^(https?:|mailto:)/i;

const MOST_CHARACTERS = 40000, MOST_MILLISECONDS = 200, MOST_LEVELS = 24;
let level = 0; // of what is being made: beyond the last, text stays as it is written

/** Return the blocks of a text. A text that nests too deep, or takes too long to parse, is one block of plain text. */
function blocksOf(element, text) {
  const plain = [{ type: "plain", raw: text }];
  if (element.isPlain || text.length > MOST_CHARACTERS) return plain;
  const began = performance.now();
  try {
    const tokens = lexer(text, { gfm: true, breaks: true }).filter((token) => token.type !== "space" && token.type !== "def");
    tokens.forEach((token, i) => { if (element.children[i]?.markdown !== token.raw) token.made = block(token); });
    element.isPlain = performance.now() - began > MOST_MILLISECONDS;
    return element.isPlain ? plain : tokens;
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // the stack is full
    element.isPlain = true;
    return plain;
  }
}

/** Show markdown in an element. Unchanged blocks are kept, so a growing reply costs only its last block. */
export function show(element, text) {
  const tokens = blocksOf(element, text);
  tokens.forEach((token, i) => {
    const old = element.children[i];
    if (old && old.markdown === token.raw) return;
    const made = token.made ?? block(token);
    made.markdown = token.raw;
    if (old) old.replaceWith(made);
    else element.append(made);
  });
  while (element.children.length > tokens.length) element.lastChild.remove();
}

/** Make something one level further in. */
function nested(token, make) {
  if (level >= MOST_LEVELS) return token.raw;
  level += 1;
  try { return make(token); } finally { level -= 1; }
}

const block = (token) => nested(token, makeBlock);
const inline = (token) => nested(token, makeInline);

function makeBlock(token) {
  switch (token.type) {
    case "heading": return h(`h${Math.min(6, token.depth + 2)}`, null, inlines(token.tokens));
    case "code": return codeBlock(token);
    case "blockquote": return h("blockquote", null, token.tokens.filter((one) => one.type !== "space").map(block));
    case "hr": return h("hr");
    case "list": return list(token);
    case "table": return table(token);
    case "plain": return h("p", { class: "plain" }, token.raw);
    case "paragraph": return h("p", null, inlines(token.tokens));
    case "text": return h("p", null, token.tokens ? inlines(token.tokens) : token.text);
    default: return h("p", null, token.raw);
  }
}

function codeBlock(token) {
  const code = h("code", null, token.text);
  const copy = h("button", { type: "button", class: "copy-code", "aria-label": "Copy this code", onclick: async () => {
    await copyText(token.text);
    copy.replaceChildren(icon("check"), "Copied");
    setTimeout(() => copy.replaceChildren(icon("copy"), "Copy"), 1500);
  } }, icon("copy"), "Copy");
  const language = (token.lang ?? "").split(/\s/)[0];
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", null, language || "code"), copy),
    h("pre", { tabindex: "0" }, code));
}

function list(token) {
  const items = token.items.map((item) => h("li", item.task ? { class: "task" } : null,
    item.task && h("input", { type: "checkbox", disabled: true, checked: item.checked, "aria-label": "Task" }),
    item.tokens.filter((one) => one.type !== "space" && one.type !== "checkbox").map((one) => (one.type === "text" ? inlines(one.tokens ?? [one]) : block(one)))));
  return h(token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? { start: token.start } : null, items);
}

function table(token) {
  const cell = (tag) => (one, i) => h(tag, token.align[i] && { class: `to-${token.align[i]}` }, inlines(one.tokens));
  return h("div", { class: "table", tabindex: "0" }, h("table", null,
    h("thead", null, h("tr", null, token.header.map(cell("th")))),
    h("tbody", null, token.rows.map((row) => h("tr", null, row.map(cell("td")))))));
}

function inlines(tokens) { return (tokens ?? []).map(inline); }

function makeInline(token) {
  switch (token.type) {
    case "strong": return h("strong", null, inlines(token.tokens));
    case "em": return h("em", null, inlines(token.tokens));
    case "del": return h("del", null, inlines(token.tokens));
    case "codespan": return h("code", null, token.text);
    case "br": return h("br");
    case "link": return SAFE.test(token.href)
      ? h("a", { href: token.href, target: "_blank", rel: "noopener noreferrer" }, inlines(token.tokens))
      : token.raw;
    case "image": return token.raw; // nothing is loaded from elsewhere
    case "text": return token.tokens ? h("span", null, inlines(token.tokens)) : token.text;
    case "escape": return token.text;
    default: return token.raw;
  }
}
