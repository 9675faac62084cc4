/** @file Vocabulary: the text of token ids, asked of the server as they occur. */

/** Most ids of one question. */
const BATCH = 4096;

export class Vocabulary {
  /** How many tokens there are. */
  size = 0;
  /** @type {Set<number>} Tokens that end a reply. */
  ends = new Set();
  /** @type {Set<number>} Control tokens. */
  special = new Set();

  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.#api = api;
  }

  #api;
  /** @type {Map<number, string>} */
  #texts = new Map();
  /** @type {Map<number, Promise<void>>} Ids that are being asked for, each with its question. */
  #asked = new Map();

  /** @param {any} info What /tokenizer_info says. */
  read(info) {
    this.size = info.logits_size;
    this.ends = new Set(info.eos_token_ids);
    for (const { id, token } of info.special_tokens) {
      this.special.add(id);
      this.#texts.set(id, token);
    }
  }

  /**
   * @param {number} id
   * @returns {string | undefined} Undefined where it is not known yet.
   */
  text(id) {
    return this.#texts.get(id);
  }

  /**
   * @param {number} id
   * @param {string} text
   */
  learn = (id, text) => {
    if (!this.#texts.has(id)) this.#texts.set(id, text);
  };

  /**
   * Wait until the texts of these ids are known, or cannot be.
   * @param {Iterable<number>} ids
   */
  async know(ids) {
    const unknown = [...new Set(ids)].filter((id) => !this.#texts.has(id));
    const fresh = unknown.filter((id) => !this.#asked.has(id));
    for (let start = 0; start < fresh.length; start += BATCH) {
      const batch = fresh.slice(start, start + BATCH);
      const question = this.#ask(batch);
      for (const id of batch) this.#asked.set(id, question);
    }
    await Promise.all(unknown.map((id) => this.#asked.get(id)));
  }

  /** @param {number[]} tokens */
  async #ask(tokens) {
    try {
      const reply = await this.#api.call("detokenize", { tokens, return_token_strs: true });
      tokens.forEach((id, place) => this.#texts.set(id, reply.token_strs[place]));
    } catch {
      // An id stands for its text where the server does not say it. The next question asks again.
    } finally {
      for (const id of tokens) this.#asked.delete(id);
    }
  }
}
