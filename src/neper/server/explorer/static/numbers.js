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
  return `${value.toExponential(1)} %`;
}

/** @param {number} value */
export function nats(value) {
  return Math.abs(value) < 0.0005 ? "0" : value.toFixed(value < 0.1 ? 3 : 2);
}

const GLYPHS = new Map([
  ["\n", "↵"],
  ["\t", "⇥"],
  ["\r", "␍"],
  [" ", "␣"],
]);

/**
 * A token's text with its spaces and control characters made visible.
 * @param {string | undefined} text
 */
export function spelled(text) {
  if (text === undefined) return "…";
  if (text === "") return "∅";
  return text.replace(/^ +| +$|[\n\t\r]/g, (found) =>
    [...found].map((character) => GLYPHS.get(character) ?? character).join(""),
  );
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
