/** @file Tabs: which part of the page is shown. */

export class Tabs {
  /** @param {HTMLElement} list Its tabs name their panels by `aria-controls`. */
  constructor(list) {
    this.#tabs = [.../** @type {NodeListOf<HTMLElement>} */ (list.querySelectorAll("[role=tab]"))];
    list.addEventListener("click", (event) => {
      const tab = /** @type {HTMLElement} */ (event.target).closest("[role=tab]");
      if (tab) this.#show(this.#tabs.indexOf(/** @type {HTMLElement} */ (tab)));
    });
    list.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const count = this.#tabs.length;
      const next = (this.#tabs.indexOf(/** @type {HTMLElement} */ (document.activeElement)) + step + count) % count;
      this.#show(next);
      this.#tabs[next].focus();
    });
  }

  #tabs;

  /** @param {number} shown */
  #show(shown) {
    this.#tabs.forEach((tab, place) => {
      tab.setAttribute("aria-selected", String(place === shown));
      tab.tabIndex = place === shown ? 0 : -1;
      const panel = document.getElementById(tab.getAttribute("aria-controls") ?? "");
      if (panel) panel.hidden = place !== shown;
    });
  }
}
