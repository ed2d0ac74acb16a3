// Writes numbers as the library does: bytes with three digits in a binary unit, counts with their noun.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  const step = Math.min(Math.max(0, Math.floor(Math.log2(Math.max(n, 1)) / 10)), 4);
  const number = n / 1024 ** step;
  return `${number >= 999.5 ? number.toFixed(0) : Number(number.toPrecision(3))} ${UNITS[step]}`;
}

const WHOLE = new Intl.NumberFormat("en");

export const whole = (n) => WHOLE.format(Math.round(n));

export const count = (n, one, several = `${one}s`) => `${whole(n)} ${n === 1 ? one : several}`;

export const percent = (part, all) => (all && part ? `${(100 * part / all).toPrecision(part / all < 0.0995 ? 2 : 3)} %` : "0 %");

export function seconds(n) {
  if (n < 0.0995) return `${Math.max(1, Math.round(n * 1000))} ms`;
  return n < 9.95 ? `${n.toFixed(1)} s` : `${Math.round(n)} s`;
}

/** Write how long ago a time was, in unix seconds. */
export function ago(at) {
  const passed = Date.now() / 1000 - at;
  if (passed < 60) return "now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h`;
  return new Date(at * 1000).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

export function clip(text, most) {
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}
