/** @file KeyDialog: asks for the API key. The key stays in this tab. */

import { button, element } from "./dom.js";

/**
 * @param {string} message What is wrong with the key that was sent.
 * @returns {Promise<string>} Rejects when the user gives none.
 */
export function askKey(message) {
  const input = element("input", { type: "password", required: true, autocomplete: "off", "aria-label": "API key" });
  const form = element(
    "form",
    { method: "dialog" },
    element("h2", { id: "key-title" }, "This server needs an API key"),
    message && element("p", { role: "alert" }, message),
    element("p", {}, "It is kept until this tab is closed, and is sent to this server only."),
    input,
    element(
      "div",
      { class: "actions" },
      element("button", { class: "primary", value: "use" }, "Use this key"),
      button("Cancel", () => dialog.close("")),
    ),
  );
  const dialog = element("dialog", { "aria-labelledby": "key-title" }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (dialog.returnValue === "use" && input.value) resolve(input.value.trim());
      else reject(new Error("no key"));
    });
  });
}
