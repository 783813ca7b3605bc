// The extension: a timeline on the Scheduler, a provenance strip on the nodes that know what ran. Both are DOM widgets,
// which the classic canvas and Nodes 2.0 show alike. What they write, they write as text into the nodes' own widgets.

import { app } from "../../scripts/app.js";
import { addProvenance } from "./provenance.js";
import { addTimeline } from "./timeline.js";

const WIDGETS = {
  SpecARScheduler: addTimeline,
  SpecARSpeculativeSampler: addProvenance,
  SpecARVideoDecode: addProvenance,
};

app.registerExtension({
  name: "specar.strips",
  settings: [
    {
      id: "SpecAR.Strips",
      name: "Show schedules and what ran as strips of blocks",
      category: ["SpecAR", "Nodes", "Strips"],
      type: "boolean",
      defaultValue: true,
      onChange: (shown) => document.body.classList.toggle("specar-without-strips", !shown),
    },
  ],
  nodeCreated(node) {
    WIDGETS[node.comfyClass]?.(node);
  },
});
