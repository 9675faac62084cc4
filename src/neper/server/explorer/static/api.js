/** @file Api: requests to the server that sent this page, and what goes wrong with them. */

import { events } from "./events.js";

/** A request that failed, in the words of the server where it said any. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string | null, retryAfter?: string | null}} [facts]
   */
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The name under which the key is kept until the tab is closed. */
const KEPT_KEY = "neper-api-key";

export class Api {
  /** The server's address: this file is one folder below it, also behind a proxy that adds a path. */
  base = new URL("../", import.meta.url).href;
  /** Set by the model list. */
  model = "";

  /**
   * @param {(message: string) => Promise<string>} askKey Asks the user for a key; rejects when there is none.
   */
  constructor(askKey) {
    this.#askKey = askKey;
  }

  #askKey;
  /** @type {Promise<void> | null} */
  #asking = null;

  get key() {
    return sessionStorage.getItem(KEPT_KEY);
  }

  /**
   * @param {string} path
   * @param {object} [body] A JSON body makes it a POST.
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>} The JSON of the answer.
   */
  async call(path, body, signal) {
    const response = await this.#send(path, body, signal);
    try {
      return await response.json();
    } catch (error) {
      throw unreachable(error, signal);
    }
  }

  /**
   * The chunks of a streamed answer, as a list for each piece that arrived. Throws ApiError for an error event, and
   * where the stream ends before its end was sent.
   * @param {string} path
   * @param {object} body
   * @param {AbortSignal} signal
   * @returns {AsyncGenerator<any[]>}
   */
  async *stream(path, body, signal) {
    const response = await this.#send(path, { ...body, stream: true }, signal);
    let ended = false;
    try {
      for await (const found of events(/** @type {ReadableStream<Uint8Array>} */ (response.body))) {
        ended = found.at(-1) === "[DONE]";
        const chunks = (ended ? found.slice(0, -1) : found).map((data) => JSON.parse(data));
        const broken = chunks.findIndex((chunk) => chunk.error);
        yield broken < 0 ? chunks : chunks.slice(0, broken);
        if (broken >= 0) throw told(chunks[broken], response.status);
      }
    } catch (error) {
      if (error instanceof ApiError || signal.aborted) throw error;
      throw new ApiError("The stream broke off before its end.", { code: "stream_cut" });
    }
    if (!ended) throw new ApiError("The stream broke off before its end.", { code: "stream_cut" });
  }

  /**
   * @param {string} path
   * @param {object} [body]
   * @param {AbortSignal} [signal]
   * @returns {Promise<Response>} A response that succeeded.
   */
  async #send(path, body, signal) {
    for (;;) {
      const used = this.key;
      /** @type {Record<string, string>} */
      const headers = body === undefined ? {} : { "Content-Type": "application/json" };
      if (used) headers.Authorization = `Bearer ${used}`;
      let response;
      try {
        response = await fetch(this.base + path, {
          method: body === undefined ? "GET" : "POST",
          headers,
          body: body === undefined ? undefined : JSON.stringify(body),
          signal,
          cache: "no-store",
          credentials: "omit",
          referrerPolicy: "no-referrer",
        });
      } catch (error) {
        throw unreachable(error, signal);
      }
      if (response.ok) return response;
      const error = told(await response.json().catch(() => null), response.status, response.headers.get("retry-after"));
      if (response.status !== 401) throw error;
      // Another request may have been told a new key meanwhile.
      if (used === this.key) await this.#newKey(used ? "The server does not accept this key." : "", error);
    }
  }

  /**
   * One question, whoever waits for its answer.
   * @param {string} message
   * @param {ApiError} refused
   */
  async #newKey(message, refused) {
    this.#asking ??= this.#askKey(message)
      .then((key) => sessionStorage.setItem(KEPT_KEY, key))
      .finally(() => {
        this.#asking = null;
      });
    try {
      await this.#asking;
    } catch {
      throw refused;
    }
  }
}

/**
 * @param {any} reply
 * @param {number} status
 * @param {string | null} [retryAfter]
 */
function told(reply, status, retryAfter = null) {
  const message = reply?.error?.message ?? `The server answered with status ${status}.`;
  return new ApiError(message, { status, code: reply?.error?.code ?? null, retryAfter });
}

/**
 * @param {unknown} error
 * @param {AbortSignal} [signal]
 */
function unreachable(error, signal) {
  if (signal?.aborted) return error;
  return new ApiError("The server cannot be reached. It may have stopped.", { code: "unreachable" });
}
