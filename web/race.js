// The race: the page that specar_core makes of the videos and their reports, inside the node.

import { create } from "./placing.js";
import { addElements, after } from "./strip.js";

export function addRace(node) {
  const hint = create("div", { class: "specar-line" }, "The race shows here after a run.");
  const frame = create("iframe", { class: "specar-race", title: "race", hidden: "" });
  addElements(node, "race", hint, frame);

  /** In the theme of ComfyUI, which may be another than the system's. */
  const follow = () => {
    const dark = document.querySelector("html.dark-theme, body.dark-theme");
    frame.contentDocument?.documentElement.style.setProperty("color-scheme", dark ? "dark" : "light");
  };
  const theme = new MutationObserver(follow);
  for (const element of [document.documentElement, document.body]) theme.observe(element, { attributeFilter: ["class"] });
  frame.addEventListener("load", follow);
  after(node, "onRemoved", () => theme.disconnect());

  after(node, "onExecuted", (output) => {
    const [race] = output?.specar_race ?? [];
    if (!race) return;
    frame.srcdoc = race.page;
    frame.hidden = false;
    hint.hidden = true;
  });
}
