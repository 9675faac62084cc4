/** @file Composer: the form in which a prompt is written, as a conversation, as a text to continue, or to score. */

import { button, element } from "./dom.js";

/** @typedef {"chat" | "text" | "score"} Kind */
/** @typedef {{role: string, content: string}} Message */
/** @typedef {{kind: Kind, messages: Message[], text: string}} Prompt */

const KINDS = /** @type {const} */ ([
  ["chat", "Chat", "Generate"],
  ["text", "Continue a text", "Generate"],
  ["score", "Score a text", "Score"],
]);
const ROLES = ["user", "assistant", "system"];

let made = 0;

export class Composer {
  /**
   * @param {{submit: () => void, stop: () => void}} listener
   * @param {{kinds?: readonly Kind[], verb?: string, more?: HTMLElement}} [form] The kinds that can be chosen, the word
   *   on the button where it is always the same, and a part of the form below the prompt.
   */
  constructor({ submit, stop }, { kinds = ["chat", "text", "score"], verb, more } = {}) {
    this.#verb = verb;
    const name = `kind${made++}`;
    this.#radios = KINDS.filter(([kind]) => kinds.includes(kind)).map(([kind, label]) => {
      const radio = element("input", { type: "radio", name, value: kind, onchange: () => this.#arrange() });
      return { kind, radio, label: element("label", {}, radio, element("span", {}, label)) };
    });
    this.#messages = element("div", { class: "messages" });
    this.#text = element("textarea", { rows: 3, "aria-label": "Text", placeholder: "Once upon a time" });
    this.#add = button("Add a message", () => this.#addMessage("user", "", true), { class: "quiet add" });
    this.#submit = element("button", { type: "submit", class: "primary" }, "Generate");
    this.#stop = button("Stop", stop, { hidden: true });
    this.element = element(
      "form",
      {
        class: "composer",
        onsubmit: (/** @type {Event} */ event) => {
          event.preventDefault();
          submit();
        },
        onkeydown: (/** @type {KeyboardEvent} */ event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            submit();
          }
        },
      },
      element(
        "fieldset",
        { class: "kinds" },
        element("legend", { class: "unseen" }, "What to do"),
        ...this.#radios.map(({ label }) => label),
      ),
      this.#messages,
      this.#text,
      more,
      element("div", { class: "actions" }, this.#submit, this.#stop, this.#add),
    );
    this.prompt = { kind: kinds[0], messages: [{ role: "user", content: "" }], text: "" };
  }

  #verb;
  #radios;
  #messages;
  #text;
  #add;
  #submit;
  #stop;
  /** @type {{role: HTMLSelectElement, content: HTMLTextAreaElement, row: HTMLElement}[]} */
  #rows = [];

  /** @returns {Prompt} */
  get prompt() {
    const messages = this.#rows.map(({ role, content }) => ({ role: role.value, content: content.value }));
    return { kind: this.#kind, messages, text: this.#text.value };
  }

  set prompt({ kind, messages, text }) {
    for (const { kind: its, radio } of this.#radios) radio.checked = its === kind;
    this.#rows = [];
    this.#messages.replaceChildren();
    for (const { role, content } of messages) this.#addMessage(role, content, false);
    this.#text.value = text;
    this.#arrange();
  }

  /** True where nothing is written. */
  get empty() {
    const { kind, messages, text } = this.prompt;
    return kind === "chat" ? messages.every(({ content }) => content === "") : text === "";
  }

  /** A conversation needs a model with a chat template. */
  withoutChat() {
    const chat = this.#radios.find(({ kind }) => kind === "chat");
    if (!chat) return;
    chat.radio.disabled = true;
    chat.label.title = "This model has no chat template";
    if (this.#kind === "chat") this.prompt = { ...this.prompt, kind: "text" };
  }

  /**
   * Add the reply to the conversation, and an empty message after it.
   * @param {string} text
   */
  answer(text) {
    this.#addMessage("assistant", text, false);
    this.#addMessage("user", "", true);
  }

  /** @param {boolean} busy */
  set busy(busy) {
    this.#stop.hidden = !busy;
  }

  focus() {
    (this.#kind === "chat" ? this.#rows.at(-1)?.content : this.#text)?.focus();
  }

  /** @returns {Kind} */
  get #kind() {
    return this.#radios.find(({ radio }) => radio.checked)?.kind ?? "text";
  }

  #arrange() {
    const kind = this.#kind;
    this.#messages.hidden = this.#add.hidden = kind !== "chat";
    this.#text.hidden = kind === "chat";
    this.#submit.textContent = this.#verb ?? KINDS.find(([its]) => its === kind)?.[2] ?? "";
  }

  /**
   * @param {string} role
   * @param {string} value
   * @param {boolean} focus
   */
  #addMessage(role, value, focus) {
    const roles = element("select", { "aria-label": "Role" }, ...ROLES.map((name) => new Option(name, name)));
    roles.value = role;
    const content = element("textarea", { rows: 2, value, "aria-label": "Message" });
    if (!this.#rows.length) content.placeholder = "What is the capital of France?";
    const row = element(
      "div",
      { class: "message" },
      roles,
      content,
      button("×", () => this.#remove(row), { class: "quiet remove", "aria-label": "Remove this message" }),
    );
    this.#rows.push({ role: roles, content, row });
    this.#messages.append(row);
    if (focus) content.focus();
  }

  /** @param {HTMLElement} row */
  #remove(row) {
    if (this.#rows.length === 1) {
      this.#rows[0].content.value = "";
    } else {
      this.#rows = this.#rows.filter((other) => other.row !== row);
      row.remove();
    }
    this.#rows.at(-1)?.content.focus();
  }
}
