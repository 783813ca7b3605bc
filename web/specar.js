// The extension: a timeline on the Scheduler, a provenance strip on the nodes that know what ran, the race. They are DOM
// widgets, which the classic canvas and Nodes 2.0 show alike. What they write, they write as text into the nodes' own
// widgets.

import { app } from "../../scripts/app.js";
import { addProvenance } from "./provenance.js";
import { addRace } from "./race.js";
import { addTimeline } from "./timeline.js";

const WIDGETS = {
  SpecARScheduler: addTimeline,
  SpecARSpeculativeSampler: addProvenance,
  SpecARVideoDecode: addProvenance,
  SpecARRace: addRace,
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
    {
      id: "SpecAR.Preview", // read by nodes/host.py from what the server keeps of the settings
      name: "Play the newest block while a video grows",
      category: ["SpecAR", "Nodes", "Preview"],
      type: "boolean",
      defaultValue: true,
    },
  ],
  nodeCreated(node) {
    WIDGETS[node.comfyClass]?.(node);
  },
});
