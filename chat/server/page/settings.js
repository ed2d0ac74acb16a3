// Asks for what the page needs to know: the key of the server, the settings, a name.

import * as api from "/page/api.js";
import { state, saveSettings } from "/page/state.js";
import { h, ask, leave } from "/page/dom.js";

const field = (label, input, note) => h("label", { class: "field" }, h("span", null, label), input, note && h("small", null, note));

/** Ask for the server's API key; returns `{key, remember}`, or null. */
export async function askKey(wasWrong) {
  const key = h("input", { type: "password", autocomplete: "current-password", autofocus: true, required: true, "aria-label": "API key" });
  const remember = h("input", { type: "checkbox" });
  const chosen = await ask("This server wants its key", [
    h("p", { class: "quiet" }, wasWrong ? "That was not the key. Look at what the server was started with: --api-key, or HYBRID_MEMORY_API_KEY." : "Whoever started the server chose it: --api-key, or HYBRID_MEMORY_API_KEY."),
    field("API key", key), h("label", { class: "check" }, remember, " Keep it in this browser"),
  ], [leave(), h("button", { value: "yes", class: "primary" }, "Use this key")]);
  return chosen === "yes" ? { key: key.value.trim(), remember: remember.checked } : null;
}

/** Ask for a name; returns it, or null. */
export async function askName(name) {
  const input = h("input", { type: "text", value: name, autofocus: true, maxlength: "200", "aria-label": "Name" });
  const chosen = await ask("Name this conversation", [input], [leave(), h("button", { value: "yes", class: "primary" }, "Save")]);
  return chosen === "yes" && input.value.trim() ? input.value.trim() : null;
}

export async function openSettings() {
  const now = state.settings;
  const number = (name, props) => h("input", { type: "number", name, value: now[name], placeholder: "the server's", ...props });
  const instructions = h("textarea", { rows: "4", placeholder: "None" });
  instructions.value = now.instructions;
  const inputs = {
    temperature: number("temperature", { min: 0, max: 2, step: 0.05 }), top_p: number("top_p", { min: 0.01, max: 1, step: 0.01 }),
    max_output_tokens: number("max_output_tokens", { min: 1, step: 1 }), seed: number("seed", { step: 1, placeholder: "random" }),
  };
  const themes = ["system", "light", "dark"], theme = document.documentElement.dataset.theme ?? "system";
  const look = h("select", null, themes.map((name) => h("option", { value: name, selected: name === theme }, { system: "As the system", light: "Light", dark: "Dark" }[name])));
  look.addEventListener("change", () => setTheme(look.value));
  const chosen = await ask("Settings", [
    field("System prompt", instructions, "Sent with every message. A model without one refuses it."),
    h("div", { class: "grid" },
      field("Temperature", inputs.temperature, "0 always takes the likeliest token."), field("Top p", inputs.top_p, "Of the likeliest tokens with this much of the whole."),
      field("Longest reply", inputs.max_output_tokens, "In tokens."), field("Seed", inputs.seed, "The same seed draws the same reply.")),
    field("Colours", look),
    api.hasKey() && h("p", null, h("button", { type: "button", onclick: (event) => { api.forgetKey(); event.target.textContent = "Forgotten"; } }, "Forget the API key")),
  ], [leave(), h("button", { value: "yes", class: "primary" }, "Save")]);
  if (chosen !== "yes") { setTheme(theme); return; }
  saveSettings({ instructions: instructions.value, ...Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value])) });
}

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("hybrid-memory.theme", name);
  document.dispatchEvent(new CustomEvent("theme"));
}
