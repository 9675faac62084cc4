/** @file Branches: a reply and the replies that go on from other tokens of it, as a tree that can be walked back. */

/** @typedef {import("./scores.js").Token} Token */

let made = 0;

/** A continuation: the tokens that are its own, after those of its parent up to a place. */
export class Branch {
  /** @type {Token[]} Its own. Those before are shared with its parent: the same objects. */
  tokens = [];
  /** @type {Branch[]} */
  children = [];
  /** @type {string | null} Why it ended: stop, length, stopped, scored, or null while it is written. */
  finish = null;
  /** @type {Error | null} */
  error = null;
  /** @type {{path: string, body: object} | null} The request to which it is the answer, for people to repeat. */
  request = null;

  /**
   * @param {Branch | null} parent
   * @param {number} at The place in the whole path at which its own tokens begin.
   */
  constructor(parent, at) {
    this.id = made++;
    this.parent = parent;
    this.at = at;
    parent?.children.push(this);
  }

  /** @returns {Token[]} All tokens from the beginning. */
  path() {
    const before = this.parent ? this.parent.path().slice(0, this.at) : [];
    return before.concat(this.tokens);
  }
}

/** The branches of one prompt. */
export class Tree {
  /**
   * @param {number[]} prompt The ids before the first token.
   */
  constructor(prompt) {
    this.prompt = prompt;
    this.root = new Branch(null, 0);
  }

  /** @returns {Generator<{branch: Branch, depth: number}>} All branches, each before its children. */
  *all(branch = this.root, depth = 0) {
    yield { branch, depth };
    for (const child of branch.children) yield* this.all(child, depth + 1);
  }

  /**
   * The branches that have a path's tokens up to a place, and what each has there.
   * @param {Token[]} path
   * @param {number} place
   * @returns {{branch: Branch, id: number}[]}
   */
  through(path, place) {
    const found = [];
    for (const { branch } of this.all()) {
      const other = branch.path();
      // Shared tokens are the same objects, and what is before a shared token is shared.
      if (other.length > place && (place === 0 || other[place - 1] === path[place - 1])) {
        found.push({ branch, id: other[place].id });
      }
    }
    return found;
  }

  /**
   * The places of a path at which branches leave it or another.
   * @param {Token[]} path
   * @returns {Set<number>}
   */
  forks(path) {
    const places = new Set();
    for (const { branch } of this.all()) {
      const before = branch.parent?.path();
      const last = branch.at - 1;
      if (before && branch.at < path.length && (last < 0 || before[last] === path[last])) places.add(branch.at);
    }
    return places;
  }
}
