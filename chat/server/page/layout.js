// Opens and closes the list and the inspector where there is no room for all three columns.

import { $ } from "/page/dom.js";
import * as memory from "/page/memory.js";

const app = () => $("app").classList;

export function start() {
  $("open-sidebar").addEventListener("click", () => toggle("show-sidebar", "close-sidebar"));
  $("close-sidebar").addEventListener("click", closeAll);
  $("open-inspector").addEventListener("click", () => toggle("show-inspector", "close-inspector"));
  $("close-inspector").addEventListener("click", closeAll);
  $("scrim").addEventListener("click", closeAll);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !document.querySelector("dialog[open]")) closeAll(); });
  const tabs = [$("tab-tree"), $("tab-memory")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => showPanel(tab.id.slice(4)));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[1 - tabs.indexOf(tab)];
      showPanel(other.id.slice(4));
      other.focus();
    });
  }
  showPanel("tree", { quietly: true });
}

function toggle(name, focus) {
  const opens = !app().contains(name);
  closeAll();
  if (opens) {
    app().add(name);
    $(focus).focus();
  }
  memory.check();
}

export function closeAll() {
  app().remove("show-sidebar", "show-inspector");
  memory.check();
}

/** Show the tree or the memory; where both fit, both are shown always. */
export function showPanel(name, { quietly = false } = {}) {
  for (const other of ["tree", "memory"]) {
    $(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
    $(`${other}-panel`).classList.toggle("chosen", other === name);
  }
  if (!quietly) $(`${name}-panel`).scrollTop = 0;
  if (!quietly && getComputedStyle($("open-inspector")).display !== "none") app().add("show-inspector");
  memory.check();
}
