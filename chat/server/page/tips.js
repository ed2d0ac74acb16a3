// Shows one tip at a time, for what has `data-tip` (words) or `data-term` (a term that terms.js explains). An element
// whose words change often has a function `tipNow` that returns them, and an empty `data-tip`.

import { $ } from "/page/dom.js";
import { TERMS } from "/page/terms.js";

let owner = null;
let timer = 0;

export function start() {
  const wants = (event) => event.target.closest?.("[data-tip], [data-term]");
  document.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch") later(wants(event), 250); });
  document.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) later(wants(event), 0); });
  document.addEventListener("focusout", hide);
  document.addEventListener("pointerdown", (event) => { hide(); if (event.target.closest("[data-term]")) later(wants(event), 0); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", () => { if (!$("tip").hidden) hide(); }, { capture: true, passive: true });
}

function later(element, milliseconds) {
  if (element === owner) return;
  hide();
  owner = element;
  if (element) timer = setTimeout(() => say(element), milliseconds);
}

function say(element) {
  const box = element.getBoundingClientRect();
  place(element.tipNow?.() ?? element.dataset.tip ?? TERMS[element.dataset.term] ?? "", box.left + box.width / 2, box.top, box.bottom);
  element.setAttribute("aria-describedby", "tip");
}

/** Show words beside a point, as what is drawn on a canvas needs. */
export function place(words, center, top, bottom) {
  const tip = $("tip");
  if (!words || !document.contains(tip)) return;
  tip.textContent = words;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(center - width / 2, innerWidth - width - 8));
  const over = top - height - 8;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(over > 8 ? over : bottom + 8)}px)`;
}

export function hide() {
  clearTimeout(timer);
  owner?.removeAttribute("aria-describedby");
  owner = null;
  $("tip").hidden = true;
}
