// What ran: the model that made each block, as high as it took long, from the report of the last run.

import { create, fill } from "./placing.js";
import { addElements, after } from "./strip.js";

export function addProvenance(node) {
  const strip = create("div", {
    class: "specar-strip specar-ran",
    role: "list",
    "aria-label": "which model made each block",
  });
  const totals = create("div", { class: "specar-line" }, "Which model made each block shows here after a run.");
  addElements(node, "provenance", strip, totals);

  after(node, "onExecuted", (output) => {
    const [report] = output?.specar ?? [];
    if (!report) return;
    const longest = Math.max(...report.blocks.map((block) => block.seconds));
    fill(
      strip,
      report.blocks.map(({ index, role, seconds, forwards, rejected }) => {
        const judged = rejected ? `, ${rejected} rejected` : "";
        const told = `block ${index}: ${role}, ${seconds.toFixed(2)} s, ${forwards} forwards${judged}`;
        return {
          role: "listitem",
          class: rejected ? `${role} rejected` : role,
          style: `--part: ${seconds / longest}`,
          title: told,
          "aria-label": told,
        };
      }),
    );
    totals.replaceChildren(
      ...["target", "drafter"].map((role) => total(role, report)),
      `all: ${report.timings.total.toFixed(1)} s`,
    );
  });
}

function total(role, report) {
  const blocks = report.blocks.filter((block) => block.role === role);
  const seconds = blocks.reduce((sum, block) => sum + block.seconds, 0);
  return create("span", { class: role }, `${role}: ${blocks.length} in ${seconds.toFixed(1)} s`);
}
