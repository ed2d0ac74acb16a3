// Suggests what one can say to the embedded model, which talks about nothing but facts that it was told.

const SAID = ["My cat is called Tom.", "I live in Berlin.", "My favourite colour is teal.", "My lucky number is 4711."];
const ASKED = [
  [/\bmy ([a-z ]+?)(?:'s name)? is (?:now )?(?:called|named) /i, (thing) => `What is my ${thing} called?`],
  [/\bthe name of my ([a-z ]+?) is /i, (thing) => `What is my ${thing} called?`],
  [/\bi (?:now )?live in /i, () => "Where do I live?"],
  [/\bmy ((?:[a-z]+ )?(?:name|colour|city|food|number)) is /i, (thing) => `What is my ${thing}?`],
];
const MOST = 3;

/** What the embedded model can talk about, for somebody who sees the page for the first time. */
export const ABOUT = "The embedded model is tiny: it only remembers what you tell it. Tell it names, cities, colours and numbers, spelt as you like, one fact a sentence; change your mind; then ask.";

/** Facts to begin with. */
export const beginnings = () => SAID;

/** Questions about what these messages of the user tell and do not ask yet, the newest facts first. */
export function questions(texts) {
  const asked = new Set(texts), found = new Set();
  for (const text of texts.toReversed()) {
    for (const [pattern, ask] of ASKED) {
      const told = text.match(pattern);
      if (told && !asked.has(ask(told[1]?.toLowerCase()))) found.add(ask(told[1]?.toLowerCase()));
    }
  }
  return [...found].slice(0, MOST);
}
