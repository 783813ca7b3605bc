// The race: the page that specar_core makes of the videos and their reports, inside the node.

import { addElements, after, create } from "./strip.js";

export function addRace(node) {
  const hint = create("div", { class: "specar-line" }, "The race shows here after a run.");
  const frame = create("iframe", { class: "specar-race", title: "race", hidden: "" });
  addElements(node, "race", hint, frame);

  after(node, "onExecuted", (output) => {
    const [race] = output?.specar_race ?? [];
    if (!race) return;
    frame.srcdoc = race.page;
    frame.hidden = false;
    hint.hidden = true;
  });
}
