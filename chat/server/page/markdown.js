// Turns markdown into elements. marked only splits the text; elements are made here, so HTML stays text.

import { lexer } from "/page/marked.js";
import { h, icon } from "/page/dom.js";

const SAFE = /^(https?:|mailto:)/i;

/** Show markdown in an element. Blocks that are as they were stay, so a growing reply costs only its last block. */
export function show(element, text) {
  const tokens = lexer(text, { gfm: true, breaks: true }).filter((token) => token.type !== "space" && token.type !== "def");
  tokens.forEach((token, i) => {
    const old = element.children[i];
    if (old && old.markdown === token.raw) return;
    const made = block(token);
    made.markdown = token.raw;
    if (old) old.replaceWith(made);
    else element.append(made);
  });
  while (element.children.length > tokens.length) element.lastChild.remove();
}

function block(token) {
  switch (token.type) {
    case "heading": return h(`h${Math.min(6, token.depth + 2)}`, null, inlines(token.tokens));
    case "code": return codeBlock(token);
    case "blockquote": return h("blockquote", null, token.tokens.filter((one) => one.type !== "space").map(block));
    case "hr": return h("hr");
    case "list": return list(token);
    case "table": return table(token);
    case "paragraph": return h("p", null, inlines(token.tokens));
    case "text": return h("p", null, token.tokens ? inlines(token.tokens) : token.text);
    default: return h("p", null, token.raw);
  }
}

function codeBlock(token) {
  const code = h("code", null, token.text);
  const copy = h("button", { type: "button", class: "copy-code", "aria-label": "Copy this code", onclick: async () => {
    await navigator.clipboard.writeText(token.text);
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

function inline(token) {
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
