/** @file TokenView: a reply as a list of tokens, each shaded by its probability; one of them is selected. */

import { element } from "./dom.js";
import { percent, pronounced } from "./numbers.js";
import { band, hesitates, rankOf } from "./scores.js";

/** @typedef {import("./scores.js").Token} Token */

/**
 * What a view tells of its tokens, by their places.
 * @typedef {object} Listener
 * @property {(place: number) => void} selected
 * @property {(place: number | null) => void} pointed The pointer is over it; null: over none.
 * @property {(rank: number) => void} choose The alternative of this rank, 1 for the best.
 * @property {() => void} enter Go to the alternatives.
 * @property {() => void} back Go to the branch from which this one went.
 */

/**
 * A line of so many tokens ends before the next word. What is laid out with each frame is the last line alone. Ends that
 * the text has itself are marked (↵).
 */
const LONG_LINE = 400;

let made = 0;

export class TokenView {
  /** @type {Token[]} */
  tokens = [];
  /** The place of the selected token; -1 where none is. */
  selected = -1;

  /**
   * @param {string} label
   * @param {import("./vocabulary.js").Vocabulary} vocabulary
   * @param {Listener} listener
   */
  constructor(label, vocabulary, listener) {
    this.#vocabulary = vocabulary;
    this.#listener = listener;
    this.#prefix = `view${made++}-`;
    this.element = element("div", {
      class: "tokens",
      role: "listbox",
      tabIndex: 0,
      "aria-label": label,
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
      onclick: (/** @type {Event} */ event) => this.#click(event),
      onfocus: () => this.tokens.length && this.select(Math.max(this.selected, 0)),
      onpointerover: (/** @type {Event} */ event) => this.#pointed(event),
      onpointerleave: () => this.#listener.pointed(null),
    });
  }

  #vocabulary;
  #listener;
  #prefix;
  /** @type {HTMLElement[]} */
  #spans = [];
  /** @type {HTMLElement | null} The block of the line that is not ended. */
  #line = null;
  /** Tokens of it. */
  #inLine = 0;
  #shown = 0;
  #frame = 0;

  /**
   * Show other tokens.
   * @param {Token[]} tokens
   * @param {string} lead The text before them, which has no tokens here.
   */
  show(tokens, lead) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.tokens = [];
    this.#spans = [];
    this.#line = null;
    this.#inLine = 0;
    this.#shown = 0;
    this.selected = -1;
    this.element.replaceChildren();
    this.element.removeAttribute("aria-activedescendant");
    if (lead) {
      this.#line = newLine();
      this.#line.append(element("span", { class: "lead" }, lead));
      this.element.append(this.#line);
    }
    this.append(tokens);
    this.#flush();
  }

  /**
   * Add tokens at the end; they appear with the next frame.
   * @param {Token[]} tokens
   */
  append(tokens) {
    for (const token of tokens) this.tokens.push(token);
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  /** Mark the places at which branches leave. @param {Set<number>} forks */
  mark(forks) {
    this.#flush();
    this.#spans.forEach((span, place) => span.classList.toggle("fork", forks.has(place)));
  }

  /**
   * @param {number} place
   * @param {{reveal?: boolean}} [how] Reveal: scroll to it.
   */
  select(place, { reveal = true } = {}) {
    this.#flush();
    const span = this.#spans[place];
    if (!span) return;
    const before = this.#spans[this.selected];
    before?.removeAttribute("aria-selected");
    if (before) this.#name(before, this.tokens[this.selected]);
    this.selected = place;
    span.id = this.#prefix + place;
    span.setAttribute("aria-selected", "true");
    span.setAttribute("aria-label", this.#described(place));
    this.element.setAttribute("aria-activedescendant", span.id);
    if (reveal) span.scrollIntoView({ block: "nearest" });
    this.#listener.selected(place);
  }

  /**
   * Name an element for screen readers, where its text is not a name.
   * @param {HTMLElement} span
   * @param {Token} token
   */
  #name(span, token) {
    if (token.text.trim()) span.removeAttribute("aria-label");
    else span.setAttribute("aria-label", this.#heard(token));
  }

  /** @param {Token} token */
  #heard(token) {
    if (token.text.trim()) return token.text;
    if (token.text) return pronounced(token.text);
    return this.#vocabulary.special.has(token.id) ? (this.#vocabulary.text(token.id) ?? "") : "part of a character";
  }

  /** @param {number} place */
  #described(place) {
    const token = this.tokens[place];
    const rank = rankOf(token);
    const parts = [this.#heard(token)];
    if (token.logprob !== null) parts.push(percent(token.logprob));
    if (rank) parts.push(rank.exact ? `rank ${rank.rank}` : `rank ${rank.rank} or later`);
    if (this.#spans[place].classList.contains("fork")) parts.push("branches here");
    parts.push(`token ${place + 1} of ${this.tokens.length}`);
    return parts.join(", ");
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (this.#shown === this.tokens.length) return;
    const lines = document.createDocumentFragment();
    let line = this.#line ?? lines.appendChild(newLine());
    let pending = document.createDocumentFragment();
    const end = () => {
      line.append(pending);
      line = lines.appendChild(newLine());
      pending = document.createDocumentFragment();
      this.#inLine = 0;
    };
    for (; this.#shown < this.tokens.length; this.#shown++) {
      const token = this.tokens[this.#shown];
      if (this.#inLine >= LONG_LINE && token.text.startsWith(" ")) end();
      const span = this.#span(token, this.#shown);
      this.#spans.push(span);
      // The space before a word is not shaded: it may hang at the end of the line above.
      const space = token.text.length > span.textContent.length ? [" "] : [];
      pending.append(...space, span);
      this.#inLine += 1;
      if (token.text.endsWith("\n")) end();
    }
    line.append(pending);
    this.element.append(lines);
    this.#line = line;
  }

  /**
   * @param {Token} token
   * @param {number} place
   */
  #span(token, place) {
    const span = document.createElement("span");
    const special = this.#vocabulary.special.has(token.id);
    let names = "token";
    if (token.logprob !== null) {
      names += ` band${band(token.logprob)}`;
      span.dataset.percent = String(Math.round(100 * Math.exp(token.logprob)));
    }
    if (special) names += " special";
    if (token.text.includes("\n")) names += " newline";
    if (token.text === "") {
      names += special ? " silent" : " held";
      if (special) span.dataset.name = this.#vocabulary.text(token.id);
    }
    span.className = names;
    span.dataset.place = String(place);
    span.setAttribute("role", "option");
    this.#name(span, token);
    span.textContent = /^ \S/.test(token.text) ? token.text.slice(1) : token.text;
    return span;
  }

  /** @param {Event} event */
  #place(event) {
    const target = /** @type {Element} */ (event.target).closest("[data-place]");
    return target instanceof HTMLElement ? Number(target.dataset.place) : null;
  }

  /** @param {Event} event */
  #click(event) {
    const place = this.#place(event);
    if (place !== null) this.select(place, { reveal: false });
  }

  /** @param {Event} event */
  #pointed(event) {
    const place = this.#place(event);
    if (place !== null) this.#listener.pointed(place);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.tokens.length) return;
    const last = this.tokens.length - 1;
    const at = Math.max(this.selected, 0);
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowRight: () => this.select(Math.min(at + 1, last)),
      ArrowLeft: () => this.select(Math.max(at - 1, 0)),
      ArrowDown: () => this.select(this.#beside(at, 1)),
      ArrowUp: () => this.select(this.#beside(at, -1)),
      PageDown: () => this.select(Math.min(at + 50, last)),
      PageUp: () => this.select(Math.max(at - 50, 0)),
      Home: () => this.select(0),
      End: () => this.select(last),
      n: () => this.#hesitation(at, 1),
      p: () => this.#hesitation(at, -1),
      Enter: () => this.#listener.enter(),
      " ": () => this.#listener.enter(),
      Backspace: () => this.#listener.back(),
    };
    const act = /^[1-9]$/.test(event.key) ? () => this.#listener.choose(Number(event.key)) : keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /**
   * @param {number} at
   * @param {1 | -1} step
   */
  #hesitation(at, step) {
    for (let place = at + step; place >= 0 && place < this.tokens.length; place += step) {
      if (hesitates(this.tokens[place])) return this.select(place);
    }
  }

  /**
   * The token of the line above or below that is nearest to one.
   * @param {number} at
   * @param {1 | -1} step
   */
  #beside(at, step) {
    const from = box(this.#spans[at]);
    let found = at;
    /** @type {number | null} */
    let top = null;
    let distance = Infinity;
    for (let place = at + step; place >= 0 && place < this.#spans.length; place += step) {
      const { top: its, middle } = box(this.#spans[place]);
      if (Math.abs(its - from.top) < 4) continue;
      top ??= its;
      if (Math.abs(its - top) >= 4) break;
      if (Math.abs(middle - from.middle) < distance) {
        distance = Math.abs(middle - from.middle);
        found = place;
      }
    }
    return found;
  }
}

/** @param {HTMLElement} span */
function box(span) {
  const { top, left, width } = span.getClientRects()[0] ?? span.getBoundingClientRect();
  return { top, middle: left + width / 2 };
}

function newLine() {
  return element("div", { class: "line", dir: "auto" });
}
