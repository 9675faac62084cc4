/** @file Details: what is known of a token, and the alternatives in its place, as bars that can be chosen. */

import { button, element } from "./dom.js";
import { nats, percent, spelled } from "./numbers.js";
import { band, entropy, rankOf } from "./scores.js";

/** @typedef {import("./scores.js").Token} Token */

export class Details {
  /**
   * @param {import("./vocabulary.js").Vocabulary} vocabulary
   * @param {(id: number) => void} choose
   * @param {() => void} leave Go back to the tokens.
   */
  constructor(vocabulary, choose, leave) {
    this.#vocabulary = vocabulary;
    this.#choose = choose;
    this.#leave = leave;
    this.element = element("section", { class: "details", "aria-label": "The selected token" });
    this.clear();
  }

  #vocabulary;
  #choose;
  #leave;
  /** @type {Token | null} */
  #token = null;
  /** @type {HTMLElement | null} */
  #list = null;

  clear() {
    this.#token = null;
    this.#list = null;
    this.element.replaceChildren(
      element("p", { class: "hint" }, "Point at a token, or select one, to see what else could stand there."),
    );
  }

  /**
   * @param {Token} token
   * @param {number} place
   * @param {number} count
   * @param {Set<number>} explored Ids with which a branch goes on here.
   */
  show(token, place, count, explored) {
    this.#token = token;
    this.#draw(token, place, count, explored);
    const unknown = [token, ...token.alternatives].filter((other) => this.#vocabulary.text(other.id) === undefined);
    if (unknown.length) {
      this.#vocabulary
        .know(unknown.map((other) => other.id))
        .then(() => this.#token === token && this.#draw(token, place, count, explored));
    }
  }

  /** Move the focus to the alternatives. */
  focus() {
    const buttons = this.#buttons();
    (buttons.find((one) => one.getAttribute("aria-current") !== "true") ?? buttons[0])?.focus();
  }

  /** @returns {HTMLButtonElement[]} */
  #buttons() {
    return [.../** @type {NodeListOf<HTMLButtonElement>} */ (this.element.querySelectorAll(".alternatives button"))];
  }

  /**
   * @param {Token} token
   * @param {number} place
   * @param {number} count
   * @param {Set<number>} explored
   */
  #draw(token, place, count, explored) {
    const focused = this.#buttons().indexOf(/** @type {any} */ (document.activeElement));
    this.element.replaceChildren(
      element(
        "header",
        {},
        element("h2", { class: "name" }, spelled(this.#name(token))),
        element("p", { class: "where" }, `token ${place + 1} of ${count} · id ${token.id}`),
      ),
      token.logprob === null ? nothing() : this.#facts(token),
      token.alternatives.length ? this.#alternatives(token, explored) : "",
    );
    if (focused >= 0) this.#buttons()[focused]?.focus();
  }

  /** @param {Token} token */
  #name(token) {
    return token.text || this.#vocabulary.text(token.id);
  }

  /** @param {Token} token */
  #facts(token) {
    const logprob = /** @type {number} */ (token.logprob);
    const rank = rankOf(token);
    const { least, most, listed, mass } = entropy(token, this.#vocabulary.size);
    const bounds = nats(least) === nats(most) ? nats(most) : `${nats(least)}–${nats(most)}`;
    const covered = percent(Math.log(mass));
    const size = this.#vocabulary.size.toLocaleString("en");
    return element(
      "div",
      {},
      element(
        "dl",
        { class: "facts" },
        fact("Probability", percent(logprob)),
        fact("Surprisal", `${nats(-logprob)} nats`),
        fact("Rank", rank ? (rank.exact ? rank.rank.toLocaleString("en") : `${rank.rank} or later`) : "unknown"),
        fact("Entropy", `${bounds} nats`),
      ),
      element(
        "p",
        { class: "basis" },
        `The entropy is from the ${listed} probabilities that are known here, ${covered} in all, and bounds for the ` +
          `rest of the ${size} tokens.`,
      ),
    );
  }

  /**
   * @param {Token} token
   * @param {Set<number>} explored
   */
  #alternatives(token, explored) {
    const listed = token.alternatives.some((other) => other.id === token.id);
    const rows = [...token.alternatives];
    if (!listed && token.logprob !== null) rows.push({ id: token.id, logprob: token.logprob });
    const mass = rows.reduce((sum, other) => sum + Math.exp(other.logprob), 0);
    this.#list = element(
      "ol",
      {
        class: "alternatives",
        "aria-label": "Alternatives, most likely first",
        onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
      },
      ...rows.map((other, place) => {
        const own = other.id === token.id;
        const text = own && token.text ? token.text : this.#vocabulary.text(other.id);
        const note = own ? "here" : explored.has(other.id) ? "branch" : "";
        const bar = element("span", { class: `bar band${band(other.logprob)}`, "aria-hidden": "true" });
        // The style of an element, unlike its attribute, is open to scripts under the page's policy.
        bar.style.inlineSize = `${100 * Math.exp(other.logprob)}%`;
        const made = button("", () => this.#choose(other.id), {
          title: own ? "The token that stands here" : `Go on from this token (id ${other.id})`,
          "aria-current": own ? "true" : undefined,
        });
        made.append(
          element("span", { class: "place" }, listed || place < rows.length - 1 ? String(place + 1) : "…"),
          element("span", { class: "text" }, text === undefined ? `#${other.id}` : spelled(text)),
          element("span", { class: "note" }, note),
          element("span", { class: "percent" }, percent(other.logprob)),
          element("span", { class: "track", "aria-hidden": "true" }, bar),
        );
        return element("li", {}, made);
      }),
    );
    return element(
      "div",
      {},
      element("h3", {}, "Choose one to go on from it"),
      this.#list,
      element("p", { class: "rest" }, `All others: ${percent(Math.log(Math.max(1 - mass, 0)))}`),
    );
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const buttons = this.#buttons();
    const at = buttons.indexOf(/** @type {any} */ (document.activeElement));
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) buttons[Math.min(Math.max(at + step, 0), buttons.length - 1)].focus();
    else if (event.key === "Escape" || event.key === "ArrowLeft") this.#leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/**
 * @param {string} name
 * @param {string} value
 */
function fact(name, value) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value));
}

function nothing() {
  return element("p", { class: "hint" }, "Nothing comes before this token, so it has no probability.");
}
