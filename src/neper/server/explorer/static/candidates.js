/** @file Candidates: given answers to a prompt, ranked by the model. */

import { announce } from "./announcer.js";
import { Composer } from "./composer.js";
import { copy, curl } from "./copying.js";
import { button, element, labelled } from "./dom.js";
import { counted, nats, percent, spelled } from "./numbers.js";
import { ApiError } from "./api.js";
import { Problem } from "./problem.js";
import { band } from "./scores.js";

const MEASURES = {
  sum: "the whole candidate",
  mean: "the mean of its tokens",
};

export class Candidates {
  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.#api = api;
    this.#lines = element("textarea", { rows: 4, placeholder: "Paris\nLyon\nBerlin" });
    this.#measure = element("select", {}, ...Object.entries(MEASURES).map(([value, name]) => new Option(name, value)));
    const more = element(
      "div",
      { class: "given" },
      labelled("Candidates, one per line; spaces count", this.#lines),
      labelled("Compare by", this.#measure),
    );
    this.composer = new Composer(
      { submit: () => this.run(), stop: () => this.#running?.abort() },
      { kinds: ["chat", "text"], verb: "Rank", more },
    );
    this.#result = element("div", { class: "ranking", hidden: true });
    this.element = element(
      "section",
      { class: "pane", "aria-label": "Candidates" },
      this.composer.element,
      this.#problem.element,
      this.#result,
    );
  }

  #api;
  #lines;
  #measure;
  #result;
  #problem = new Problem();
  /** @type {AbortController | null} */
  #running = null;

  async run() {
    const candidates = this.#lines.value.split("\n").filter((/** @type {string} */ line) => line !== "");
    if (this.composer.empty || !candidates.length) {
      if (this.composer.empty) this.composer.focus();
      else this.#lines.focus();
      return;
    }
    const { kind, messages, text } = this.composer.prompt;
    const body = {
      model: this.#api.model,
      ...(kind === "chat" ? { messages } : { prompt: text }),
      candidates,
      normalize: this.#measure.value,
      return_tokens: true,
    };
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    this.#problem.clear();
    this.composer.busy = true;
    try {
      this.#show(await this.#api.call("v1/candidates", body, running.signal), body);
    } catch (error) {
      const missing = error instanceof ApiError && error.status === 404 && error.code === "not_found";
      const told = missing ? new ApiError("This server does not rank candidates: it has no /v1/candidates.") : error;
      if (!running.signal.aborted) this.#problem.show(told, missing ? null : { label: "Try again", act: () => this.run() });
    } finally {
      if (this.#running === running) this.composer.busy = false;
    }
  }

  /**
   * @param {any} reply
   * @param {object} body
   */
  #show(reply, body) {
    const ranked = [...reply.candidates].sort((one, other) => one.rank - other.rank);
    const columns = ["Rank", "Candidate", "Probability among them", "Logprob", "Mean per token"];
    this.#result.replaceChildren(
      element(
        "div",
        { class: "tools" },
        button("Copy JSON", () => copy(JSON.stringify(reply, null, 2), "JSON")),
        button("Copy curl", () => copy(curl(this.#api.base, { path: "v1/candidates", body }, !!this.#api.key), "curl")),
      ),
      element(
        "div",
        { class: "scrolls", tabIndex: 0, role: "region", "aria-label": "Ranking" },
        element(
          "table",
          {},
          element("caption", {}, caption(reply)),
          element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)))),
          element("tbody", {}, ...ranked.map((candidate) => row(candidate))),
        ),
      ),
    );
    this.#result.hidden = false;
    announce(`First of ${ranked.length}: ${ranked[0].text}`);
  }
}

/** @param {any} reply */
function caption({ candidates, prompt_tokens: tokens, boundary }) {
  const text = `${counted(candidates.length, "candidate")} after ${counted(tokens, "prompt token")}`;
  if (boundary?.kind !== "merged") return text;
  return `${text}; the end of the prompt, “${spelled(boundary.text)}”, is scored with each of them`;
}

/** @param {any} candidate */
function row(candidate) {
  const logprob = Math.log(candidate.probability);
  const bar = element("span", { class: "bar", "aria-hidden": "true" });
  bar.style.inlineSize = `${100 * candidate.probability}%`;
  return element(
    "tr",
    {},
    element("td", { class: "number" }, String(candidate.rank)),
    element("th", { scope: "row" }, ...spelledTokens(candidate)),
    element(
      "td",
      { class: "share" },
      element("span", { class: "track", "aria-hidden": "true" }, bar),
      element("span", { class: "percent" }, percent(logprob)),
    ),
    element("td", { class: "number" }, nats(candidate.logprob)),
    element("td", { class: "number" }, nats(candidate.mean_logprob)),
  );
}

/**
 * A candidate's tokens, shaded where the server tells their logprobs.
 * @param {any} candidate
 * @returns {(Node | string)[]}
 */
function spelledTokens(candidate) {
  const entries = candidate.logprobs?.content ?? candidate.logprobs;
  if (!Array.isArray(entries)) return [spelled(candidate.text)];
  return entries.map((entry) =>
    element(
      "span",
      { class: `token band${band(entry.logprob)}`, title: `${percent(entry.logprob)}, ${nats(entry.logprob)}` },
      spelled(entry.token),
    ),
  );
}
