/** @file Copying: texts for the clipboard, and a place to copy from by hand where a page may not use it. */

import { announce } from "./announcer.js";
import { button, element } from "./dom.js";

/**
 * A request as a command of a shell. The key is not in it: the shell has it in a variable.
 * @param {string} base
 * @param {{path: string, body: object}} request
 * @param {boolean} needsKey
 */
export function curl(base, { path, body }, needsKey) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = needsKey ? ` -H "Authorization: Bearer $NEPER_API_KEY"` : "";
  return `curl -s '${base}${path}' -H 'Content-Type: application/json'${key} -d '${quoted}'`;
}

/**
 * @param {string} text
 * @param {string} name
 */
export async function copy(text, name) {
  try {
    // Absent on pages that came over plain HTTP from another machine.
    await navigator.clipboard.writeText(text);
    announce(`${name} copied`);
    return true;
  } catch {
    byHand(text, name);
    return false;
  }
}

/**
 * @param {string} text
 * @param {string} name
 */
function byHand(text, name) {
  const area = element("textarea", { value: text, readOnly: true, rows: 10, "aria-label": name });
  const dialog = element(
    "dialog",
    { "aria-label": `${name} to copy` },
    element("p", {}, "This browser does not let the page copy. Copy it from here:"),
    area,
    button("Close", () => dialog.close()),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  area.select();
}
