/** @file BranchList: the tree of branches as nested buttons; the one that is shown is marked. */

import { button, element } from "./dom.js";
import { counted, shortened, spelled } from "./numbers.js";

/** @typedef {import("./branches.js").Branch} Branch */

/** Characters of a branch's text that are shown. */
const LENGTH = 60;

export class BranchList {
  /**
   * @param {import("./vocabulary.js").Vocabulary} vocabulary
   * @param {(branch: Branch) => void} show
   */
  constructor(vocabulary, show) {
    this.#vocabulary = vocabulary;
    this.#show = show;
    this.element = element("nav", { class: "branches", "aria-label": "Branches", hidden: true });
  }

  #vocabulary;
  #show;

  /**
   * @param {import("./branches.js").Tree} tree
   * @param {Branch} current
   */
  draw(tree, current) {
    this.element.hidden = tree.root.children.length === 0;
    const focused = this.element.contains(document.activeElement);
    const count = [...tree.all()].length;
    const list = element("ul", {}, this.#item(tree.root, current));
    this.element.replaceChildren(element("h2", {}, counted(count, "branch").replace("branchs", "branches")), list);
    if (focused) this.element.querySelector("[aria-current]")?.focus();
  }

  /**
   * @param {Branch} branch
   * @param {Branch} current
   * @returns {HTMLElement}
   */
  #item(branch, current) {
    const first = branch.tokens[0];
    const text = shortened(branch.tokens.map((token) => token.text).join(""), LENGTH);
    const name = branch.parent && first ? spelled(first.text || this.#vocabulary.text(first.id)) : null;
    const made = button("", () => this.#show(branch), {
      "aria-current": branch === current ? "true" : undefined,
    });
    made.append(
      element("span", { class: "from" }, branch.parent ? `at token ${branch.at + 1}` : "first"),
      name === null ? "" : element("span", { class: "text" }, name),
      element("span", { class: "preview" }, text),
    );
    return element(
      "li",
      {},
      made,
      branch.children.length > 0 && element("ul", {}, ...branch.children.map((child) => this.#item(child, current))),
    );
  }
}
