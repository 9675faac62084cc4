/** @file Plot: the surprisal of each token of a text, as bars on a canvas. */

import { element } from "./dom.js";
import { nats } from "./numbers.js";
import { band } from "./scores.js";

/** @typedef {import("./scores.js").Token} Token */

const HEIGHT = 88;
/** Surprisals beyond this are cut off, so that the others can be told apart. */
const MOST = 12;
/** Places while tokens still come; they double when they are full, so each bar is drawn few times. */
const PLACES = 64;

export class Plot {
  /** @param {(place: number) => void} select */
  constructor(select) {
    this.#canvas = element("canvas", { class: "plot-canvas", "aria-hidden": "true" });
    this.#scale = element("span", { class: "plot-scale", "aria-hidden": "true" });
    this.#caption = element("figcaption", {}, "Surprisal over the text");
    this.#marker = element("span", { class: "plot-marker", hidden: true });
    const area = element("div", { class: "plot-area" }, this.#canvas, this.#marker);
    this.element = element("figure", { class: "plot" }, this.#caption, this.#scale, area);
    const pick = (/** @type {PointerEvent} */ event) => {
      if (event.type === "pointermove" && event.buttons !== 1) return;
      const place = Math.floor((event.offsetX / this.#canvas.clientWidth) * this.#places);
      if (this.#tokens.length) select(Math.min(Math.max(place, 0), this.#tokens.length - 1));
    };
    this.#canvas.addEventListener("pointerdown", pick);
    this.#canvas.addEventListener("pointermove", pick);
    new ResizeObserver(() => this.#redraw()).observe(this.#canvas);
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)", "(forced-colors: active)"]) {
      matchMedia(query).addEventListener("change", () => this.#redraw());
    }
  }

  #canvas;
  #scale;
  #caption;
  #marker;
  /** @type {Token[]} */
  #tokens = [];
  #drawn = 0;
  #places = PLACES;
  #most = 4;
  #selected = -1;
  #frame = 0;
  #whole = false;
  /** @type {string[]} */
  #colours = [];

  /**
   * Draw the tokens of a list that were not drawn, with the next frame.
   * @param {Token[]} tokens The same list as before, or another.
   * @param {boolean} whole True where no more will come: then they fill the width.
   */
  show(tokens, whole) {
    if (tokens !== this.#tokens || whole !== this.#whole) this.#drawn = 0;
    if (tokens !== this.#tokens) this.#selected = -1;
    this.#tokens = tokens;
    this.#whole = whole;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /**
   * The words about the plot, for those who do not see it too.
   * @param {string} text
   */
  describe(text) {
    this.#caption.textContent = text;
  }

  /** @param {number} place */
  select(place) {
    this.#selected = place;
    this.#mark();
  }

  #mark() {
    this.#marker.hidden = this.#selected < 0;
    this.#marker.style.insetInlineStart = `${(100 * this.#selected) / this.#places}%`;
    this.#marker.style.inlineSize = `${100 / this.#places}%`;
  }

  #redraw() {
    this.#drawn = 0;
    this.#colours = [];
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const width = this.#canvas.clientWidth;
    if (!width) return;
    const count = this.#tokens.length;
    let most = this.#drawn ? this.#most : 4;
    for (let place = this.#drawn; place < count; place++) {
      most = Math.max(most, Math.min(-(this.#tokens[place].logprob ?? 0), MOST));
    }
    let places = this.#whole ? Math.max(count, 1) : PLACES;
    while (places < count) places *= 2;
    if (places !== this.#places || most !== this.#most) this.#drawn = 0;
    this.#places = places;
    this.#most = most;
    const context = /** @type {CanvasRenderingContext2D} */ (this.#canvas.getContext("2d"));
    if (this.#drawn === 0) this.#clear(context, width);
    const each = width / places;
    const gap = each > 4 ? 1 : 0;
    for (; this.#drawn < count; this.#drawn++) {
      const { logprob } = this.#tokens[this.#drawn];
      if (logprob === null) continue;
      const height = Math.max((Math.min(-logprob, MOST) / most) * (HEIGHT - 2), 1);
      context.fillStyle = this.#colours[band(logprob)];
      context.fillRect(this.#drawn * each, HEIGHT - height, Math.max(each - gap, 1), height);
    }
    this.#mark();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} width
   */
  #clear(context, width) {
    const ratio = devicePixelRatio;
    this.#canvas.width = Math.round(width * ratio);
    this.#canvas.height = Math.round(HEIGHT * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (!this.#colours.length) {
      const style = getComputedStyle(this.#canvas);
      this.#colours = ["--bar0", "--bar1", "--bar2", "--bar3", "--bar4", "--line"].map((name) =>
        style.getPropertyValue(name).trim(),
      );
    }
    context.strokeStyle = this.#colours[LINE];
    context.lineWidth = 1;
    for (const value of [this.#most / 2, this.#most]) {
      const height = HEIGHT - Math.round((value / this.#most) * (HEIGHT - 2)) - 0.5;
      context.beginPath();
      context.moveTo(0, height);
      context.lineTo(width, height);
      context.stroke();
    }
    this.#scale.textContent = `height: ${nats(this.#most)} nats`;
  }
}

const LINE = 5;
