// Makes elements. Text is always set as text: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with an id of the page. */
export const $ = (id) => document.getElementById(id);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make an HTML element: attributes, `onclick` and the like, and children (texts or elements). */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** Make an SVG element. */
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/**
 * Make the children of an element like these, and keep the old elements where they are alike: what the reader points at
 * or has focused stays. Listeners of new elements are lost then, so what is clicked is found by its data.
 */
export function update(element, ...children) {
  const wanted = h("div", null, ...children);
  alike(element, wanted);
}

function alike(old, wanted) {
  const news = [...wanted.childNodes];
  news.forEach((child, i) => {
    const was = old.childNodes[i];
    if (!was) { old.append(child); return; }
    if (was.nodeName !== child.nodeName) { was.replaceWith(child); return; }
    if (was.nodeType === Node.TEXT_NODE) { if (was.data !== child.data) was.data = child.data; return; }
    for (const { name } of [...was.attributes]) if (name !== "style" && name !== "aria-describedby" && !child.hasAttribute(name)) was.removeAttribute(name);
    for (const { name, value } of child.attributes) if (name !== "style" && was.getAttribute(name) !== value) was.setAttribute(name, value);
    if (was.style.cssText !== child.style.cssText) was.style.cssText = child.style.cssText;
    alike(was, child);
  });
  while (old.childNodes.length > news.length) old.lastChild.remove();
}

const PATHS = {
  plus: "M8 3v10M3 8h10",
  menu: "M2.500 4.500h11M2.500 8h11M2.500 11.500h11",
  close: "M4 4l8 8M12 4l-8 8",
  send: "M8 13V3.500M4 7.200L8 3.200l4 4",
  stop: "M4.500 4.500h7v7h-7z",
  undo: "M6 3.500L3 6.500l3 3M3.200 6.500H10a3 3 0 0 1 0 6H7.500",
  redo: "M10 3.500l3 3-3 3M12.800 6.500H6a3 3 0 0 0 0 6h2.500",
  edit: "M3 13l.7-2.900L10.700 3a1.500 1.500 0 0 1 2.200 2.200l-7 7z",
  copy: "M5.500 5.500h7v7h-7zM3.500 10.500v-7h7",
  again: "M13 8a5 5 0 1 1-1.600-3.700M13 2.500V5h-2.600",
  branch: "M4.500 5.500v5M4.500 8.500c4.500 0 7-.5 7-3M4.500 5.500a1.500 1.500 0 1 0 0-3 1.500 1.500 0 0 0 0 3zM4.500 13.500a1.500 1.500 0 1 0 0-3 1.500 1.500 0 0 0 0 3zM11.500 5.500a1.500 1.500 0 1 0 0-3 1.500 1.500 0 0 0 0 3z",
  pin: "M6 2.500h4l-.5 4 2 2v1h-7v-1l2-2zM8 9.500v4",
  bin: "M3 4.500h10M6.500 4.500v-1.500h3v1.500M4.500 4.500l.5 8.500h6l.5-8.500",
  left: "M9.500 4l-4 4 4 4",
  right: "M6.500 4l4 4-4 4",
  save: "M8 2.500v7M5 7l3 3 3-3M3 13h10",
  check: "M3.500 8.500l3 3 6-7",
  panel: "M2.500 3.500h11v9h-11zM9.500 3.500v9",
  rename: "M3 4.500v-1.500h6v1.500M6 3v7M4.800 10h2.400M3 13h10",
  knife: "M8 2v12M4 5L2 8l2 3M12 5l2 3-2 3",
};

/** Make an icon of 16 by 16. */
export function icon(name) {
  return s("svg", { viewBox: "0 0 16 16", class: `i i-${name}`, "aria-hidden": "true" }, s("path", { d: PATHS[name] }));
}

/** Make a button with an icon; its name is read aloud, and shown as a tip. */
export function iconButton(name, label, onclick, props) {
  return h("button", { type: "button", class: "icon", "aria-label": label, "data-tip": label, onclick, ...props }, icon(name));
}

/** Give a button of the page its icon and its name. */
export function dress(id, name, label) {
  const button = $(id);
  button.prepend(icon(name));
  if (label) {
    button.setAttribute("aria-label", label);
    button.dataset.tip = label;
  }
  return button;
}

/** Show a dialog made of these children; resolves with what its form returns, "" if it was left. */
export function ask(title, children, buttons) {
  return new Promise((resolve) => {
    const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), children,
      h("div", { class: "buttons" }, buttons));
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(""); });
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Make a button that leaves a dialog. It does not submit, so that Enter does what the other button says. */
export const leave = () => h("button", { type: "button", onclick: (event) => event.target.closest("dialog").close("") }, "Cancel");

/** Copy a text. Browsers have no clipboard for pages that come over plain HTTP from another machine. */
export async function copyText(text) {
  if (navigator.clipboard) { await navigator.clipboard.writeText(text); return; }
  const box = h("textarea", { class: "hidden", value: text });
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

/** Ask before something is lost; true if it is to be done. */
export async function confirmed(title, text, verb) {
  const yes = h("button", { value: "yes", class: "danger", autofocus: true }, verb);
  return (await ask(title, h("p", null, text), [leave(), yes])) === "yes";
}

/** Say something in a corner for a while; with an action, until it is closed. */
export function toast(text, label, action) {
  const close = () => note.remove();
  const note = h("div", { class: "toast" }, h("span", null, text),
    label && h("button", { type: "button", onclick: () => { close(); action(); } }, label),
    iconButton("close", "Close", close));
  $("toasts").append(note);
  setTimeout(close, action ? 15000 : 5000);
}
