// Says in words what it costs to continue from a node, and what a reply has cost.

import { h } from "/page/dom.js";
import { count, whole, seconds, percent } from "/page/format.js";

const FROM = { window: "within the window", checkpoint: "from a checkpoint", host: "from host memory", disk: "from files" };

/** Return a cost as `{level, short, words}`; level 0 is free, 1 needs some tokens, 2 the whole prompt. */
export function describe(cost) {
  const n = cost?.compute_tokens ?? 0;
  const time = cost?.seconds ? `, ${seconds(cost.seconds)}` : "";
  if (!cost) return { level: 0, short: "", words: "" };
  if (cost.from === "nothing") return { level: n > 1 ? 2 : 0, short: count(n, "token"), words: `the whole prompt, ${count(n, "token")}${time}` };
  const replayed = cost.replay_tokens ? `, ${count(cost.replay_tokens, "token")} to replay` : "";
  if (n <= 1) return { level: 0, short: "free", words: `free: ${FROM[cost.from] ?? cost.from}${replayed}` };
  return { level: 1, short: count(n, "token"), words: `${FROM[cost.from] ?? cost.from}, ${count(n, "token")} to compute${replayed}${time}` };
}

/** Return reused, replayed and computed tokens of a usage, and why. */
export function partsOf(usage) {
  const more = usage.hybrid_memory ?? {};
  const reused = more.reused_tokens ?? (usage.input_tokens_details ?? usage.prompt_tokens_details)?.cached_tokens ?? 0;
  const replayed = more.replayed_tokens ?? 0;
  const computed = more.computed_tokens ?? Math.max(0, (usage.input_tokens ?? usage.prompt_tokens ?? 0) - reused - replayed);
  return { reused, replayed, computed, why: more.why ?? "", from: more.from ?? "" };
}

/** Make a bar of three parts; a part that is small can still be seen. */
export function partBar({ reused, replayed, computed }) {
  const bar = h("span", { class: "part-bar", "aria-hidden": "true" });
  for (const [name, n] of [["reused", reused], ["replayed", replayed], ["computed", computed]]) {
    if (!n) continue;
    const part = h("span", { class: name });
    part.style.flexGrow = n;
    bar.append(part);
  }
  return bar;
}

/** Say what the drafts of a reply were worth. */
function draftTip({ drafts, accepted_tokens: accepted, saved_seconds: saved }) {
  const each = `${(1 + accepted / drafts).toFixed(1)} tokens a step with a draft`;
  return saved > 0 ? `${each}; ${seconds(saved)} saved` : each;
}

/** Make the line below a reply: what of its prompt was reused, and how fast it came where that is known. */
export function spent(usage) {
  const parts = partsOf(usage), all = parts.reused + parts.replayed + parts.computed;
  const more = usage.hybrid_memory ?? {};
  const time = usage.seconds ?? ((more.queue_seconds ?? 0) + (more.prefill_seconds ?? 0) + (more.decode_seconds ?? 0));
  const tip = [`${whole(parts.reused)} reused, ${whole(parts.replayed)} replayed, ${whole(parts.computed)} computed`, parts.why].filter(Boolean).join(". ");
  return h("p", { class: "spent", "data-tip": tip }, partBar(parts),
    h("span", null, `${percent(parts.reused, all)} of the prompt reused`),
    h("span", null, `${count(usage.output_tokens ?? 0, "token")}${time ? ` in ${seconds(time)}` : ""}`),
    more.drafts ? h("span", { title: draftTip(more) }, `${whole(more.accepted_tokens)} of ${count(more.drafted_tokens, "drafted token")} right`) : null);
}
