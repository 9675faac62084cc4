/** @file Settings: how replies are sampled, and how many alternatives are listed. */

import { element, labelled } from "./dom.js";

const VIEWS = {
  raw_logprobs: "the model’s own",
  tempered_logprobs: "after temperature",
  processed_logprobs: "as sampled from",
};

export class Settings {
  constructor() {
    this.#top = number("10", { min: 0, step: 1 });
    this.#length = number("256", { min: 1, step: 1 });
    this.#temperature = number("0", { min: 0, max: 2, step: "any" });
    this.#topP = number("1", { min: 0, max: 1, step: "any" });
    this.#seed = number("", { step: 1, placeholder: "any" });
    this.#view = element("select", {}, ...Object.entries(VIEWS).map(([value, name]) => new Option(name, value)));
    const fields = element(
      "div",
      { class: "settings", role: "group", "aria-label": "Settings" },
      labelled("Alternatives", this.#top, "Most alternatives per token; the server has a limit of its own"),
      labelled("Longest reply", this.#length, "In tokens"),
      labelled("Temperature", this.#temperature, "0 takes the most likely token"),
      labelled("Top p", this.#topP),
      labelled("Seed", this.#seed),
      labelled("Probabilities", this.#view, "Which distribution the probabilities are of"),
    );
    this.element = element("details", { class: "folding" }, element("summary", {}, "Settings"), fields);
    // On wide screens there is room for them, and no summary.
    const wide = matchMedia("(min-width: 40rem)");
    this.element.open = wide.matches;
    wide.addEventListener("change", () => {
      this.element.open = wide.matches;
    });
  }

  #top;
  #length;
  #temperature;
  #topP;
  #seed;
  #view;

  get top() {
    return Math.max(0, Math.trunc(Number(this.#top.value)) || 0);
  }

  /** Fields that chat and completions share. */
  get sampling() {
    /** @type {Record<string, any>} */
    const fields = { max_tokens: Math.trunc(Number(this.#length.value)) || 256, temperature: Number(this.#temperature.value) };
    if (Number(this.#topP.value) !== 1) fields.top_p = Number(this.#topP.value);
    if (this.#seed.value !== "") fields.seed = Math.trunc(Number(this.#seed.value));
    if (this.#view.value !== "raw_logprobs") fields.logprobs_mode = this.#view.value;
    return fields;
  }
}

/**
 * @param {string} value
 * @param {Record<string, any>} properties
 */
function number(value, properties) {
  return element("input", { type: "number", value, inputMode: "decimal", ...properties });
}
