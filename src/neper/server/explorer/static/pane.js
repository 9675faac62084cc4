/** @file Pane: a prompt, its reply as tokens, and what goes on from them. */

import { announce } from "./announcer.js";
import { BranchList } from "./branch_list.js";
import { Branch, Tree } from "./branches.js";
import { Composer } from "./composer.js";
import { copy, curl } from "./copying.js";
import { Details } from "./details.js";
import { button, element } from "./dom.js";
import { scoredTokens, streamedTokens } from "./entries.js";
import { counted, nats, percent, spelled } from "./numbers.js";
import { Plot } from "./plot.js";
import { Problem } from "./problem.js";
import { readable, scoring, toldReply } from "./requests.js";
import { Totals } from "./scores.js";
import { TokenView } from "./token_view.js";

/** @typedef {import("./scores.js").Token} Token */
/** @typedef {{api: import("./api.js").Api, vocabulary: import("./vocabulary.js").Vocabulary, settings: import("./settings.js").Settings}} Shared */

/** @type {Record<string, string>} */
const ENDS = {
  stop: "ended by the model",
  length: "cut at the longest reply",
  stopped: "stopped",
  broken: "broken off",
  scored: "the whole text",
};

export class Pane {
  /**
   * @param {Shared} shared
   * @param {string} name
   */
  constructor({ api, vocabulary, settings }, name) {
    this.#api = api;
    this.#vocabulary = vocabulary;
    this.#settings = settings;
    this.composer = new Composer({ submit: () => this.run(), stop: () => this.stop() });
    this.#view = new TokenView(`Tokens of the reply, ${name}`, vocabulary, {
      selected: (place) => this.#selected(place),
      pointed: (place) => this.#pointed(place),
      choose: (rank) => this.#chooseRank(rank),
      enter: () => this.#details.focus(),
      back: () => this.#back(),
    });
    this.#details = new Details(
      vocabulary,
      (id) => this.#choose(this.#detailed, id),
      () => this.#view.element.focus(),
    );
    this.#branches = new BranchList(vocabulary, (branch) => this.#show(branch));
    this.#plot = new Plot((place) => this.#view.select(place));
    this.#goOn = button("Go on", () => this.#continue(), { title: "Generate more after the last token" });
    this.#walkBack = button("Back to the fork", () => this.#back(), { title: "Backspace" });
    this.#answer = button("Reply to it", () => this.#converse(), { title: "Add the reply to the conversation" });
    this.#tools = element(
      "div",
      { class: "tools" },
      this.#walkBack,
      this.#goOn,
      this.#answer,
      button("Copy text", () => copy(this.#text(), "Text")),
      button("Copy JSON", () => copy(JSON.stringify(this.#told(), null, 2), "JSON")),
      button("Copy curl", () => this.#copyCurl()),
    );
    this.#result = element(
      "div",
      { class: "result", hidden: true },
      element(
        "div",
        { class: "reply" },
        element("div", { class: "reply-head" }, this.#status, this.#tools),
        this.#view.element,
        this.#plot.element,
      ),
      element("div", { class: "side" }, this.#details.element, this.#branches.element),
    );
    this.element = element(
      "section",
      {
        class: "pane",
        "aria-label": name,
        onkeydown: (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.stop(),
      },
      this.composer.element,
      this.#problem.element,
      this.#result,
    );
  }

  #api;
  #vocabulary;
  #settings;
  #view;
  #details;
  #branches;
  #plot;
  #goOn;
  #walkBack;
  #answer;
  #tools;
  #result;
  #problem = new Problem();
  #status = element("p", { class: "status" });
  #totals = new Totals();
  /** The place of the token in the details. */
  #detailed = -1;
  /** @type {Tree} */
  #tree = new Tree([]);
  /** @type {Branch} */
  #branch = this.#tree.root;
  /** @type {import("./composer.js").Prompt | null} */
  #prompt = null;
  /** @type {AbortController | null} */
  #running = null;

  /** Do what the form says. */
  async run() {
    if (this.composer.empty) {
      this.composer.focus();
      return;
    }
    const prompt = this.composer.prompt;
    await this.#work(async (signal) => {
      const { tree, scored } = await this.#begin(prompt, signal);
      this.#prompt = prompt;
      this.#tree = tree;
      tree.root.tokens = scored;
      tree.root.request = readable(this.#api.model, prompt, this.#settings);
      tree.root.finish = prompt.kind === "score" ? "scored" : null;
      this.#show(tree.root);
      if (prompt.kind === "score") announce(this.#summary());
      else await this.#write(tree.root, signal);
    }, () => this.run());
  }

  /** End what is being generated; what has come stays. */
  stop() {
    this.#running?.abort();
  }

  /**
   * The ids of a prompt, or the tokens of a text that is scored.
   * @param {import("./composer.js").Prompt} prompt
   * @param {AbortSignal} signal
   * @returns {Promise<{tree: Tree, scored: Token[]}>}
   */
  async #begin({ kind, messages, text }, signal) {
    if (kind !== "score") {
      const asked = kind === "chat" ? { messages } : { prompt: text };
      const reply = await this.#api.call("tokenize", asked, signal);
      return { tree: new Tree(reply.tokens), scored: [] };
    }
    const top = this.#settings.top;
    const reply = await this.#api.call("v1/completions", scoring(this.#api.model, text, top), signal);
    const scored = scoredTokens(reply.choices[0], top, this.#vocabulary.learn);
    const [first] = scored;
    if (first) {
      await this.#vocabulary.know([first.id]);
      if (!this.#vocabulary.special.has(first.id)) first.text = this.#vocabulary.text(first.id) ?? "";
    }
    return { tree: new Tree([]), scored };
  }

  /**
   * Run something that can be stopped, and that stops what ran before.
   * @param {(signal: AbortSignal) => Promise<void>} act
   * @param {() => void} again What tries it again.
   */
  async #work(act, again) {
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    this.#problem.clear();
    this.composer.busy = true;
    try {
      await act(running.signal);
    } catch (error) {
      if (!running.signal.aborted) this.#problem.show(error, { label: "Try again", act: again });
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.composer.busy = false;
        this.#settle();
      }
    }
  }

  /**
   * Generate the rest of a branch, from the ids of all that is before it.
   * @param {Branch} branch
   * @param {AbortSignal} signal
   */
  async #write(branch, signal) {
    const top = this.#settings.top;
    const prompt = this.#tree.prompt.concat(branch.path().map((token) => token.id));
    const body = { model: this.#api.model, prompt, ...this.#settings.sampling, logprobs: top, return_token_ids: true };
    branch.request ??= { path: "v1/completions", body };
    branch.finish = null;
    this.#settle();
    const reading = { ...body, return_tokens_as_token_ids: true, skip_special_tokens: false };
    try {
      for await (const chunks of this.#api.stream("v1/completions", reading, signal)) {
        /** @type {Token[]} */
        const found = [];
        for (const { choices } of chunks) {
          for (const choice of choices) {
            found.push(...streamedTokens(choice, top));
            branch.finish = choice.finish_reason ?? branch.finish;
          }
        }
        branch.tokens.push(...found);
        if (this.#branch === branch) this.#grow(found);
      }
      branch.finish ??= "broken";
    } catch (error) {
      branch.finish = signal.aborted ? "stopped" : "broken";
      if (!signal.aborted) {
        const label = branch.tokens.length ? "Go on from here" : "Try again";
        this.#problem.show(error, { label, act: () => this.#continue() });
        return;
      }
    }
    announce(this.#summary());
  }

  /** @param {Token[]} tokens That were added to the branch that is shown. */
  #grow(tokens) {
    this.#totals.add(tokens);
    this.#view.append(tokens);
    this.#plot.show(this.#view.tokens, false);
    this.#status.textContent = `Writing: ${counted(this.#totals.count, "token")}`;
  }

  /** @param {Branch} branch */
  #show(branch) {
    const path = branch.path();
    this.#branch = branch;
    this.#totals = new Totals();
    this.#totals.add(path);
    this.#result.hidden = false;
    this.#details.clear();
    this.#detailed = -1;
    this.#view.show(path, this.#prompt?.kind === "text" ? this.#prompt.text : "");
    this.#settle();
    if (branch.parent) this.#view.select(Math.min(branch.at, path.length - 1), { reveal: false });
  }

  /** Bring all that depends on the branch, but its tokens, up to date. */
  #settle() {
    const { finish, parent } = this.#branch;
    const busy = this.#running !== null && finish === null;
    this.#view.mark(this.#tree.forks(this.#view.tokens));
    this.#plot.show(this.#view.tokens, !busy);
    this.#plot.describe(this.#described());
    this.#branches.draw(this.#tree, this.#branch);
    this.#status.textContent = busy ? "Writing …" : this.#summary();
    this.#walkBack.hidden = parent === null;
    this.#goOn.hidden = busy || finish === "stop" || this.#view.tokens.length === 0;
    this.#answer.hidden = busy || this.#prompt?.kind !== "chat";
    const place = this.#view.selected;
    if (place >= 0) this.#detail(place);
  }

  #summary() {
    const { count, mean, hesitations } = this.#totals;
    const parts = [counted(count, "token")];
    if (count) parts.push(`mean surprisal ${nats(mean)} nats`, counted(hesitations, "hesitation"));
    const end = ENDS[this.#branch.finish ?? ""];
    if (end) parts.push(end);
    return parts.join(" · ");
  }

  #described() {
    const tokens = this.#view.tokens;
    let most = -1;
    tokens.forEach(({ logprob }, place) => {
      if (logprob !== null && (most < 0 || logprob < /** @type {number} */ (tokens[most].logprob))) most = place;
    });
    if (most < 0) return "Surprisal over the text";
    const token = tokens[most];
    const name = spelled(token.text || this.#vocabulary.text(token.id));
    const value = nats(-(/** @type {number} */ (token.logprob)));
    return `Surprisal over the text; most at token ${most + 1}, “${name}”: ${value} nats`;
  }

  /** @param {number} place */
  #selected(place) {
    this.#plot.select(place);
    this.#detail(place);
  }

  /** @param {number | null} place */
  #pointed(place) {
    if (place !== null) this.#detail(place);
    else if (this.#view.selected >= 0) this.#detail(this.#view.selected);
  }

  /** @param {number} place */
  #detail(place) {
    const { tokens } = this.#view;
    this.#detailed = place;
    const explored = new Set(this.#tree.through(tokens, place).map(({ id }) => id));
    this.#details.show(tokens[place], place, tokens.length, explored);
  }

  /** @param {number} rank */
  #chooseRank(rank) {
    const other = this.#view.tokens[this.#view.selected]?.alternatives[rank - 1];
    if (other) this.#choose(this.#view.selected, other.id);
  }

  /**
   * Go on from another token in a place: with the branch that has it there, or with a new one.
   * @param {number} place
   * @param {number} id
   */
  async #choose(place, id) {
    const path = this.#view.tokens;
    const token = path[place];
    this.#view.element.focus();
    if (token.id === id) {
      announce("This token stands here already");
      return;
    }
    const there = this.#tree.through(path, place).find((other) => other.id === id);
    if (there) {
      this.#show(there.branch);
      this.#view.select(place);
      return;
    }
    let parent = this.#branch;
    while (parent.parent && place < parent.at) parent = parent.parent;
    await this.#work(async (signal) => {
      await this.#vocabulary.know([id]);
      const { alternatives } = token;
      const { logprob } = /** @type {{logprob: number}} */ (alternatives.find((other) => other.id === id));
      const branch = new Branch(parent, place);
      const ends = this.#vocabulary.ends.has(id);
      const text = ends ? "" : (this.#vocabulary.text(id) ?? "");
      branch.tokens.push({ id, text, logprob, alternatives, rank: null });
      if (ends) branch.finish = "stop";
      this.#show(branch);
      announce(`Going on from ${spelled(this.#vocabulary.text(id))}, ${percent(logprob)}`);
      if (!ends) await this.#write(branch, signal);
    }, () => this.#continue());
  }

  /** Generate more after the last token. A text that was scored stays as it is: a branch goes on from its end. */
  async #continue() {
    const branch =
      this.#branch.finish === "scored" ? new Branch(this.#branch, this.#view.tokens.length) : this.#branch;
    await this.#work(async (signal) => {
      if (branch !== this.#branch) this.#show(branch);
      branch.request = null;
      await this.#write(branch, signal);
    }, () => this.#continue());
  }

  #back() {
    const { parent, at } = this.#branch;
    if (!parent) return;
    this.#show(parent);
    this.#view.select(Math.min(at, this.#view.tokens.length - 1));
    this.#view.element.focus();
  }

  #converse() {
    this.composer.answer(this.#text());
  }

  #text() {
    return this.#view.tokens.map((token) => token.text).join("");
  }

  #told() {
    return toldReply(this.#api.model, this.#tree, this.#branch, this.#vocabulary);
  }

  #copyCurl() {
    const { request } = this.#branch;
    if (request) copy(curl(this.#api.base, request, this.#api.key !== null), "curl");
  }
}
