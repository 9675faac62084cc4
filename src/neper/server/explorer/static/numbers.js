/** @file Numbers and tokens as people read them. */

/**
 * @param {number} logprob
 * @returns {string} A percentage of about three digits.
 */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value === 0) return "0 %";
  if (value >= 99.95) return value >= 99.9995 ? "100 %" : `${value.toFixed(3)} %`;
  if (value >= 10) return `${value.toFixed(1)} %`;
  if (value >= 0.1) return `${value.toFixed(2)} %`;
  if (value >= 0.001) return `${value.toPrecision(2)} %`;
  return `${value.toExponential(1)} %`;
}

/** @param {number} value */
export function nats(value) {
  const size = Math.abs(value);
  return size < 0.0005 ? "0" : value.toFixed(size < 0.1 ? 3 : 2);
}

const GLYPHS = new Map([
  ["\n", "↵"],
  ["\t", "⇥"],
  [" ", "␣"],
]);
/** Where the pictures of control characters begin. */
const PICTURES = 0x2400;

/**
 * A token's text with its spaces and control characters made visible.
 * @param {string | undefined} text
 */
export function spelled(text) {
  if (text === undefined) return "…";
  if (text === "") return "∅";
  return text.replace(/^ +| +$|[\0-\x1f]/g, (found) =>
    [...found].map((one) => GLYPHS.get(one) ?? String.fromCharCode(PICTURES + one.charCodeAt(0))).join(""),
  );
}

const WORDS = new Map([
  ["\n", "line end"],
  ["\t", "tab"],
  [" ", "space"],
]);

/**
 * Words for a text that cannot be heard: one of spaces alone.
 * @param {string} text
 */
export function pronounced(text) {
  return [...text].map((character) => WORDS.get(character) ?? "control character").join(", ");
}

/**
 * The beginning of a text, on one line.
 * @param {string} text
 * @param {number} length
 */
export function shortened(text, length) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length - 1).trimEnd()}…` : line;
}

/**
 * @param {number} count
 * @param {string} noun
 */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
