/** @file Requests, and a reply, as people repeat and keep them. */

/** @typedef {import("./composer.js").Prompt} Prompt */

/**
 * The body that scores a text.
 * @param {string} model
 * @param {string} text
 * @param {number} top
 */
export function scoring(model, text, top) {
  return { model, prompt: text, max_tokens: 0, echo: true, prompt_logprobs: top, return_token_ids: true };
}

/**
 * The request for a prompt as people write it. Its reply is what is made here from the prompt's ids.
 * @param {string} model
 * @param {Prompt} prompt
 * @param {import("./settings.js").Settings} settings
 */
export function readable(model, { kind, messages, text }, { top, sampling }) {
  if (kind === "score") return { path: "v1/completions", body: scoring(model, text, top) };
  if (kind === "text") return { path: "v1/completions", body: { model, prompt: text, ...sampling, logprobs: top } };
  return { path: "v1/chat/completions", body: { model, messages, ...sampling, logprobs: true, top_logprobs: top } };
}

/**
 * A branch with all before it, as JSON.
 * @param {string} model
 * @param {import("./branches.js").Tree} tree
 * @param {import("./branches.js").Branch} branch
 * @param {import("./vocabulary.js").Vocabulary} vocabulary
 */
export function toldReply(model, tree, branch, vocabulary) {
  const tokens = branch.path();
  return {
    model,
    request: branch.request,
    prompt_token_ids: tree.prompt,
    text: tokens.map((token) => token.text).join(""),
    finish_reason: branch.finish,
    tokens: tokens.map(({ id, text, logprob, alternatives }) => ({
      id,
      text,
      logprob,
      alternatives: alternatives.map((other) => ({ ...other, token: vocabulary.text(other.id) ?? null })),
    })),
  };
}
