/** @file Entries: tokens from the logprobs of a reply. Tokens are read by id (`return_tokens_as_token_ids`). */

/** @typedef {import("./scores.js").Token} Token */

const ID = "token_id:";

/**
 * The tokens of a choice in a chunk of a completion.
 * @param {any} choice
 * @param {number} top The alternatives that were asked for. A list has one more where the token is none of them.
 * @returns {Token[]}
 */
export function streamedTokens(choice, top) {
  if (!choice.logprobs) {
    const ids = /** @type {number[]} */ (choice.token_ids ?? []);
    return ids.map((id, place) => ({
      id,
      text: place ? "" : choice.text,
      logprob: null,
      alternatives: [],
      rank: null,
    }));
  }
  const { tokens, token_logprobs: logprobs, top_logprobs: tops, text_offset: offsets } = choice.logprobs;
  const text = characters(choice.text);
  return tokens.map((/** @type {string} */ name, /** @type {number} */ place) => {
    const id = Number(name.slice(ID.length));
    const end = place + 1 < tokens.length ? offsets[place + 1] - offsets[0] : text.length;
    const listed = Object.entries(tops[place] ?? {}).map(([key, logprob]) => ({
      id: Number(key.slice(ID.length)),
      logprob: Number(logprob),
    }));
    return {
      id,
      text: text.slice(offsets[place] - offsets[0], end),
      logprob: logprobs[place],
      alternatives: listed.length > top ? listed.filter((other) => other.id !== id) : listed,
      rank: null,
    };
  });
}

/**
 * The tokens of a text, from its `prompt_logprobs`.
 * @param {any} choice
 * @param {number} top
 * @param {(id: number, text: string) => void} learn Is told the text of every alternative.
 * @returns {Token[]}
 */
export function scoredTokens(choice, top, learn) {
  const ids = /** @type {number[]} */ (choice.prompt_token_ids);
  return ids.map((id, place) => {
    const entry = choice.prompt_logprobs[place];
    if (!entry) return { id, text: "", logprob: null, alternatives: [], rank: null };
    // The keys of an object that are numbers come in their own order, whatever was written.
    const listed = Object.entries(entry).map(([key, other]) => ({ id: Number(key), ...other }));
    listed.sort((one, other) => other.logprob - one.logprob || one.id - other.id);
    for (const other of listed) if (other.id !== id) learn(other.id, other.decoded_token);
    const own = entry[id];
    const others = listed.length > top ? listed.filter((other) => other.id !== id) : listed;
    return {
      id,
      text: own.decoded_token,
      logprob: own.logprob,
      alternatives: others.map((other) => ({ id: other.id, logprob: other.logprob })),
      rank: own.rank,
    };
  });
}

/**
 * A text that is cut by code points, as offsets count them.
 * @param {string} text
 * @returns {{length: number, slice: (start: number, end: number) => string}}
 */
function characters(text) {
  if (!/[\ud800-\udfff]/.test(text)) return text;
  const points = Array.from(text);
  return { length: points.length, slice: (start, end) => points.slice(start, end).join("") };
}
