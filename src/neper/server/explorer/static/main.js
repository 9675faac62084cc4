/** @file The page: its parts, put together. */

import { announce } from "./announcer.js";
import { Api } from "./api.js";
import { Candidates } from "./candidates.js";
import { button, element } from "./dom.js";
import { askKey } from "./key_dialog.js";
import { Pane } from "./pane.js";
import { Problem } from "./problem.js";
import { BANDS } from "./scores.js";
import { Settings } from "./settings.js";
import { Tabs } from "./tabs.js";
import { Vocabulary } from "./vocabulary.js";

/** @param {string} id */
const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

const api = new Api(askKey);
const vocabulary = new Vocabulary(api);
const settings = new Settings();
const shared = { api, vocabulary, settings };
const panes = [new Pane(shared, "First prompt"), new Pane(shared, "Second prompt")];
const candidates = new Candidates(api);
const problem = new Problem();

const [first, second] = panes;
second.element.hidden = true;
const both = button("Run both", () => panes.forEach((pane) => pane.run()), { hidden: true });
const beside = button("Side by side", compare, { "aria-pressed": "false", title: "Two prompts side by side" });
const numbers = button("Numbers", showNumbers, { "aria-pressed": "false", title: "Show each token’s percentage" });

function compare() {
  const on = second.element.hidden;
  second.element.hidden = both.hidden = !on;
  byId("panes").classList.toggle("beside", on);
  beside.setAttribute("aria-pressed", String(on));
  if (on && second.composer.empty) second.composer.prompt = first.composer.prompt;
  if (on) second.composer.focus();
  else second.stop();
}

function showNumbers() {
  const on = document.body.classList.toggle("numbers");
  numbers.setAttribute("aria-pressed", String(on));
}

function legend() {
  const names = BANDS.map((least, place) => {
    const most = BANDS[place - 1];
    return most === undefined ? `${100 * least} % or more` : least ? `${100 * least}–${100 * most}` : `below ${100 * most}`;
  });
  return element(
    "ul",
    { class: "legend", "aria-label": "Shades by probability" },
    ...names.map((name, place) => element("li", { class: `token band${place}` }, name)),
  );
}

async function connect() {
  problem.clear();
  try {
    const [models, info] = await Promise.all([api.call("v1/models"), api.call("tokenizer_info")]);
    const [model] = models.data;
    api.model = model.id;
    vocabulary.read(info);
    if (info.chat_template === null) {
      for (const { composer } of [...panes, candidates]) composer.withoutChat();
    }
    byId("model").textContent = `${model.id} · context of ${model.max_model_len.toLocaleString("en")} tokens`;
    announce("Ready");
  } catch (error) {
    problem.show(error, { label: "Try again", act: connect });
  }
}

byId("panes").append(...panes.map((pane) => pane.element));
byId("candidates").append(candidates.element);
byId("toolbar").append(settings.element, element("div", { class: "views" }, legend(), numbers, beside, both));
byId("main").prepend(problem.element);
new Tabs(byId("tabs"));
const help = /** @type {HTMLDialogElement} */ (byId("help"));
byId("open-help").addEventListener("click", () => help.showModal());
byId("close-help").addEventListener("click", () => help.close());
connect();
