/** @file Problem: what went wrong, in words, with what can be done about it. */

import { button, element } from "./dom.js";

export class Problem {
  constructor() {
    this.element = element("div", { class: "problem", role: "alert", hidden: true });
  }

  clear() {
    this.element.hidden = true;
    this.element.replaceChildren();
  }

  /**
   * @param {any} error
   * @param {{label: string, act: () => void} | null} [remedy]
   */
  show(error, remedy = null) {
    const facts = [error.status ? `status ${error.status}` : "", error.code ?? ""].filter(Boolean).join(", ");
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    this.element.replaceChildren(
      element("p", {}, `${error.message ?? error}${wait}`, facts && element("small", {}, ` (${facts})`)),
      remedy && button(remedy.label, remedy.act),
    );
    this.element.hidden = false;
  }
}
