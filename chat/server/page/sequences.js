// Lists the largest sequences and checkpoints. Rows are made once, and only changed values are written.

import { h } from "/page/dom.js";
import { bytes, count, whole } from "/page/format.js";

const PARTS = ["body", "tail", "head", "swapped"];
const rows = [];
let list, heading, others;

/** Make the list inside an element; `choose(id)` is called with the sequence that is clicked. */
export function start(box, choose) {
  heading = h("span", { class: "quiet" });
  others = h("p", { class: "quiet" });
  list = h("ul", { class: "sequences" });
  const term = (name, words = name) => h("span", { class: "term", "data-term": name, tabindex: "0" }, words);
  box.append(h("h3", null, term("sequence", "Who holds it"), heading),
    h("p", { class: "row" }, PARTS.slice(0, 3).map((name) => h("span", null, h("i", { class: `swatch ${name}` }), term(name)))), list, others);
  list.addEventListener("click", (event) => {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id) choose(Number(id));
  });
}

function make() {
  const row = { mark: h("i"), name: document.createTextNode(""), number: h("span", { class: "number" }), pieces: {}, is: "" };
  for (const part of PARTS) row.pieces[part] = h("span", { class: part });
  row.button = h("button", { type: "button", "data-tip": "" }, h("span", { class: "name" }, row.mark, row.name),
    h("span", { class: "bar" }, Object.values(row.pieces)), row.number);
  row.button.tipNow = () => row.words();
  row.element = h("li", null, row.button);
  return row;
}

/** Draw the sequences of a snapshot. */
export function draw(data) {
  const { columns, rows: held, others: left, n, n_checkpoints: nCheckpoints } = data.sequences;
  const of = Object.fromEntries(columns.map((name, i) => [name, i]));
  const most = held.reduce((so_far, one) => Math.max(so_far, one[of.body] + one[of.tail] + one[of.head] + one[of.swapped]), 1);
  while (rows.length < held.length) { rows.push(make()); list.append(rows.at(-1).element); }
  while (rows.length > held.length) rows.pop().element.remove();
  held.forEach((one, i) => {
    const isChosen = data.sequence?.id === one[of.id], is = `${one} ${isChosen} ${most}`;
    if (rows[i].is !== is) write(rows[i], one, of, most, isChosen);
    rows[i].is = is;
  });
  heading.textContent = [n && count(n, "sequence"), nCheckpoints && count(nCheckpoints, "checkpoint")].filter(Boolean).join(", ") || "nothing yet";
  others.textContent = left.n ? `and ${whole(left.n)} others with ${bytes(left.bytes)}` : "";
}

function write(row, one, of, most, isChosen) {
  const id = one[of.id], what = one[of.is_checkpoint] ? "checkpoint" : "sequence", total = one[of.body] + one[of.tail] + one[of.head];
  row.words = () => `${what} ${id}: ${count(one[of.n_tokens], "token")}\n${bytes(total)}, of which ${bytes(one[of.shared])} shared${one[of.swapped] ? `\n${bytes(one[of.swapped])} swapped out` : ""}`;
  row.button.dataset.id = id;
  row.button.setAttribute("aria-pressed", String(isChosen));
  row.mark.className = one[of.is_checkpoint] ? "mark" : "live";
  row.name.data = `${what} ${id}`;
  for (const part of PARTS) row.pieces[part].style.width = `${(100 * one[of[part]] / most).toFixed(1)}%`;
  row.number.textContent = one[of.swapped] ? "swapped" : bytes(total);
}
