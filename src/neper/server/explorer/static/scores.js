/** @file Scores: what the numbers of a token mean. All logarithms are natural, and entropies are in nats. */

/**
 * A token that could stand in a place, with its log-probability there.
 * @typedef {{id: number, logprob: number}} Alternative
 */

/**
 * A token in its place.
 * @typedef {object} Token
 * @property {number} id
 * @property {string} text What it adds to the text: "" where it holds back part of a character, or is in no text.
 * @property {number | null} logprob Null where nothing was computed: the first token of a text.
 * @property {Alternative[]} alternatives The likeliest tokens in its place, best first.
 * @property {number | null} rank 1 for the likeliest, as the server says; null where it does not say.
 */

/** Least probabilities of the bands, from sure to unsure. `neper chat` has the same. */
export const BANDS = [0.9, 0.7, 0.4, 0.15, 0];

/**
 * @param {number} logprob
 * @returns {number} From 0, sure, to 4.
 */
export function band(logprob) {
  const probability = Math.exp(logprob);
  return BANDS.findIndex((least) => probability >= least);
}

/**
 * True where the model hesitated: the token has less than half of the probability.
 * @param {Token} token
 */
export function hesitates(token) {
  return token.logprob !== null && token.logprob < Math.log(0.5);
}

/**
 * The rank of a token: the server's, or its place among the alternatives.
 * @param {Token} token
 * @returns {{rank: number, exact: boolean} | null} Not exact: the rank is at least this. Null: nothing is known.
 */
export function rankOf(token) {
  if (token.rank !== null) return { rank: token.rank, exact: true };
  if (token.logprob === null) return null;
  const better = token.alternatives.filter((other) => other.logprob > /** @type {number} */ (token.logprob)).length;
  const listed = token.alternatives.some((other) => other.id === token.id);
  return { rank: better + 1, exact: listed };
}

/**
 * Bounds of the entropy of the whole distribution, from the probabilities that are known.
 *
 * The rest of the vocabulary shares what they leave. No token of it is likelier than the last alternative, which gives
 * the least entropy. The most is that of equal shares.
 *
 * @param {Token} token
 * @param {number} vocabulary The number of tokens there are.
 * @returns {{least: number, most: number, listed: number, mass: number}} The bounds; how many probabilities are known,
 *   and their sum.
 */
export function entropy(token, vocabulary) {
  const known = token.alternatives.map((other) => other.logprob);
  const last = known.at(-1) ?? 0;
  if (token.logprob !== null && !token.alternatives.some((other) => other.id === token.id)) known.push(token.logprob);
  let mass = 0;
  let sum = 0;
  for (const logprob of known) {
    const probability = Math.exp(logprob);
    mass += probability;
    if (probability > 0) sum -= probability * logprob;
  }
  const others = vocabulary - known.length;
  const rest = 1 - mass;
  // Below this the rest is the rounding of the numbers that were sent.
  if (others <= 0 || rest < 1e-6) return { least: sum, most: sum, listed: known.length, mass: Math.min(mass, 1) };
  const likeliest = Math.min(Math.exp(last), rest);
  return {
    least: sum - rest * Math.log(likeliest),
    most: sum + rest * Math.log(others / rest),
    listed: known.length,
    mass,
  };
}

/** Sums over tokens, kept as they come. */
export class Totals {
  count = 0;
  scored = 0;
  surprisal = 0;
  hesitations = 0;

  /** @param {Token[]} tokens */
  add(tokens) {
    this.count += tokens.length;
    for (const token of tokens) {
      if (token.logprob === null) continue;
      this.scored += 1;
      this.surprisal -= token.logprob;
      this.hesitations += hesitates(token) ? 1 : 0;
    }
  }

  /** Mean surprisal in nats. */
  get mean() {
    return this.scored ? this.surprisal / this.scored : 0;
  }
}
