/** @file Elements, made without markup: texts of a model are never read as HTML. */

/**
 * @param {string} name
 * @param {Record<string, any>} [properties] `class`, attributes with a hyphen and `role` as attributes; `on…` as
 *   listeners; others as properties.
 * @param {(Node | string | null | undefined | false)[]} children
 * @returns {any}
 */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "role" || key.includes("-")) made.setAttribute(key, String(value));
    else /** @type {any} */ (made)[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/**
 * A button that does something.
 * @param {string} label
 * @param {() => void} act
 * @param {Record<string, any>} [properties]
 */
export function button(label, act, properties = {}) {
  return element("button", { type: "button", onclick: act, ...properties }, label);
}

/**
 * A control with its label.
 * @param {string} label
 * @param {HTMLElement} control
 * @param {string} [hint]
 */
export function labelled(label, control, hint) {
  return element("label", { class: "field", title: hint }, element("span", {}, label), control);
}
