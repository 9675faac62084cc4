/** @file Announcer: the one live region of the page. It tells what has happened, never each token. */

const region = /** @type {HTMLElement} */ (document.getElementById("announcer"));

/** @param {string} text */
export function announce(text) {
  // The same text twice is read twice only if the region was empty in between.
  region.textContent = "";
  setTimeout(() => {
    region.textContent = text;
  }, 50);
}
