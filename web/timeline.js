// The schedule as a strip of blocks, on the Scheduler, below the prompts of a connected timeline. It shows what the node's
// widgets say, and every change is written back into them: policy `list` and its positions, or a formula and its k.

import { app } from "../../scripts/app.js";
import { KEYS, create, placing, scattered } from "./placing.js";
import { blocksWithCuts, cutsOf, framesWithCuts, keyed, parseTimeline, snap } from "./prompts.js";
import { bound, longestDraftRun, parsePositions, place } from "./schedule.js";
import { addElements, after } from "./strip.js";

const DRAWN = 1000; // blocks; of longer videos only the numbers are shown
const INTERVAL = 100; // milliseconds between looks at the widgets: no event tells of everything that changes them

export function addTimeline(node) {
  const { pairs } = node.constructor.nodeData.input.required.models[1];
  const strip = create("div", { class: "specar-strip", role: "group", "aria-description": KEYS });
  const facts = create("div", { class: "specar-line", role: "status" });
  const length = create("span", { class: "specar-length" });
  const buttons = [
    button("Spread", "Even distances: the shortest draft runs that so many target blocks can promise", () =>
      write({ policy: "spread", k: count() }),
    ),
    button("Cluster", "All target blocks at the front", () => write({ policy: "front", k: count() })),
    button("Scatter", "Block 0, and the others anywhere", () => writeList(scattered(shown.blocks, count()))),
  ];
  const footer = create("div", { class: "specar-line" }, length, ...buttons);
  const lane = create("div", { class: "specar-lane", role: "list", "aria-label": "prompts over time" });
  addElements(node, "timeline", lane, strip, facts, footer);

  let ran = null; // what the node said of its schedule when it ran last
  let seen = {}; // what `shown` was made of
  let shown = null; // {blocks, targets, ...} as drawn
  const drawStrip = placing(strip, writeList);

  function refresh() {
    const inputs = read(node);
    const json = JSON.stringify(inputs);
    if (json === seen.json && ran === seen.ran) return;
    seen = { json, ran };
    shown = decided(inputs, pairs, ran);
    draw();
  }

  function draw() {
    const { blocks, targets, why } = shown;
    const drawn = targets && blocks <= DRAWN;
    facts.replaceChildren(...(targets ? describe(shown) : [why]));
    length.textContent = shown.length ?? "";
    footer.hidden = !blocks;
    strip.hidden = !drawn;
    lane.hidden = !drawn || !shown.cues.length;
    if (drawn) {
      strip.setAttribute("aria-label", [...facts.children].map((fact) => fact.textContent).join(", "));
      drawStrip(targets, blocks);
      lane.replaceChildren(...prompts(shown));
    }
  }

  function write(values) {
    for (const [name, value] of Object.entries(values)) {
      const widget = node.widgets.find((widget) => widget.name === name);
      widget.value = value;
      widget.callback?.(value, app.canvas, node);
    }
    refresh();
  }

  function writeList(targets) {
    // A list cannot be empty.
    write(targets.length ? { policy: "list", positions: targets.join(",") } : { policy: "draft-only" });
  }

  const count = () => shown.targets?.length || read(node).k || 1;

  after(node, "onExecuted", (output) => (ran = output?.specar_schedule?.[0] ?? ran));
  const timer = setInterval(refresh, INTERVAL);
  after(node, "onRemoved", () => clearInterval(timer));
}

function button(text, title, onClick) {
  const element = create("button", { type: "button", title }, text);
  element.addEventListener("click", onClick);
  return element;
}

/** The values that decide a schedule. */
function read(node) {
  const values = Object.fromEntries(node.widgets.map((widget) => [widget.name, widget.value]));
  const { seconds, blocks, policy, k, positions, width, custom } = values;
  const deciding = ["seconds", "blocks", "policy", policy === "custom" ? "custom" : "k", "positions"];
  const linked = deciding.some((name) => isLinked(node, name));
  const asked = { seconds, blocks, policy, k, positions, width, custom: custom?.trim() };
  return { ...asked, linked, backbone: backbone(node), timeline: timeline(node) };
}

/** Whether another node gives a widget its value. */
const isLinked = (node, name) => node.inputs.some((input) => input.widget?.name === name && input.link != null);

/** The node that an input comes from. */
function sourceOf(node, input) {
  let source = node.getInputNode(node.findInputSlot(input));
  while (source?.type === "Reroute") source = source.getInputNode(0);
  return source;
}

/** The text of the connected Prompt Timeline. */
function timeline(node) {
  const source = sourceOf(node, "prompts");
  if (source?.comfyClass !== "SpecARPromptTimeline" || isLinked(source, "timeline")) return undefined;
  return source.widgets.find((widget) => widget.name === "timeline").value;
}

/** The name of the pair that the connected Loader loads. */
function backbone(node) {
  let source = sourceOf(node, "models");
  while (source?.comfyClass === "SpecARLora") source = sourceOf(source, "models");
  if (source?.comfyClass !== "SpecARLoader" || isLinked(source, "backbone")) return undefined;
  return source.widgets.find((widget) => widget.name === "backbone").value;
}

/** {blocks, targets, length, cues} as far as they are known before a run; without targets, `why`. */
function decided(inputs, pairs, ran) {
  const { seconds, blocks: wanted, width, linked, backbone, timeline } = inputs;
  const pair = pairs[backbone];
  if (linked) return { why: "Another node decides this when the graph runs." };
  if (!wanted && !pair)
    return { why: "Set blocks, or connect a SpecAR Loader directly: then the schedule shows here." };
  const cues = pair && timeline !== undefined ? snap(parseTimeline(timeline) ?? [], pair) : [];
  const cuts = cutsOf(cues);
  const blocks = wanted || blocksWithCuts(seconds, pair, cuts);
  const within = cues.filter((cue) => cue.block < blocks);
  const count = pair && framesWithCuts(blocks, pair, cuts);
  const again = ran?.blocks === blocks && ran.frames === count && (!width || ran.width === width);
  const { targets, why } = placed(inputs, blocks, within, pair, again ? ran : null);
  const time = again && ran.targets.join() === targets?.join() ? ran.predicted_seconds : null;
  const length = pair && `${count} frames, ${(count / pair.fps).toFixed(1)} s`;
  const told = time === null ? length : `${length}, made in about ${Math.round(time)} s`;
  return { blocks, targets, why, length: told, cues: within };
}

const SETTLED = ["sdvg", "sdvg-mean", "sdvg-quantile", "time-budget"]; // while the video is made

function placed({ policy, k, positions, custom }, blocks, cues, pair, ran) {
  const text = { auto: pair?.auto[blocks - 1] ?? "", list: `list:${positions}`, custom }[policy] ?? `${policy}:${k}`;
  const [name, argument] = text.split(":");
  const number = /^\d+$/.test(argument) ? Number(argument) : null;
  if (SETTLED.includes(name))
    return { why: `${blocks} blocks. Which the target generates is settled while they are made.` };
  if (name === "list")
    return {
      targets: parsePositions(argument ?? "", blocks),
      why: `positions must be blocks from 0 to ${blocks - 1}: 0,5,10`,
    };
  if (name === "keyed" && number !== null) {
    const marks = cues.slice(1).map((cue) => cue.block);
    return {
      targets: keyed(number, marks, blocks),
      why: `${number} target blocks are too few for block 0 and each new prompt`,
    };
  }
  return {
    targets: place(name, number, blocks) ?? (ran?.policy === text ? ran.targets : null),
    why: `${blocks} blocks. Which the target generates is known after a run.`,
  };
}

/** The prompts, each as wide as its blocks. */
function prompts({ blocks, cues }) {
  return cues.map(({ block, text, fade, cut }, i) => {
    const end = cues[i + 1]?.block ?? blocks;
    const how = cut ? " (cut)" : fade ? ` (fade over ${fade})` : "";
    const told = `from block ${block}${how}: ${text}`;
    return create(
      "span",
      {
        role: "listitem",
        class: cut ? "cut" : fade ? "fade" : "",
        style: `--length: ${end - block}; --fade: ${Math.min(1, fade / (end - block))}`,
        title: told,
        "aria-label": told,
      },
      text,
    );
  });
}

function describe({ blocks, targets }) {
  const run = longestDraftRun(targets, blocks).length;
  const least = bound(blocks, targets.length);
  const share = Math.round((100 * targets.length) / blocks);
  const promise = targets[0] === 0 ? `bound ${least}` : "no bound: the drafter begins";
  return [
    create("span", { class: "target" }, `${targets.length} of ${blocks} by the target (${share}%)`),
    create(
      "span",
      { class: "drafter" },
      `longest draft run ${run}, `,
      create("span", { class: run > least ? "over" : "" }, promise),
    ),
  ];
}
