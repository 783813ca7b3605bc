// The schedule as a strip of blocks, on the Scheduler, below the prompts of a connected timeline. It shows what the node's widgets say, and every change is written
// back into them: policy `list` and its positions, or a formula and its k.

import { app } from "../../scripts/app.js";
import { blocksWithCuts, cutsOf, framesWithCuts, keyed, parseTimeline, snap } from "./prompts.js";
import { bound, longestDraftRun, parsePositions, place } from "./schedule.js";
import { addElements, after, create, fill } from "./strip.js";

const DRAWN = 1000; // blocks; of longer videos only the numbers are shown
const INTERVAL = 100; // milliseconds between looks at the widgets: no event tells of everything that changes them
const KEYS =
  "Arrow keys move a target block, with Shift only the focus. Space makes a block a target or a drafter block. " +
  "Home and End go to the first and the last block.";

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
  let focus = 0; // the block that the Tab key reaches

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
      focus = Math.min(focus, blocks - 1);
      strip.setAttribute("aria-label", [...facts.children].map((fact) => fact.textContent).join(", "));
      fill(strip, cells(shown, focus));
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
    write(targets.length ? { policy: "list", positions: sorted(targets).join(",") } : { policy: "draft-only" });
  }

  const count = () => shown.targets?.length || read(node).k || 1;
  const isTarget = (block) => shown.targets.includes(block);
  const without = (block) => shown.targets.filter((target) => target !== block);
  const toggle = (block) => writeList(isTarget(block) ? without(block) : [...shown.targets, block]);
  const move = (from, to) => writeList([...without(from), to]);

  function focusOn(block) {
    if (!strip.children[block]) return;
    strip.children[focus].tabIndex = -1;
    focus = block;
    strip.children[focus].tabIndex = 0;
    strip.children[focus].focus();
  }

  /** The focus goes to the next drafter block, and a target block goes with it. */
  function carry(step) {
    let to = focus + step;
    while (isTarget(to)) to += step;
    if (to < 0 || to >= shown.blocks) return;
    if (isTarget(focus)) move(focus, to);
    focusOn(to);
  }

  strip.addEventListener("focusin", (event) => focusOn(Number(event.target.dataset.block)));

  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if (event.key === " " || event.key === "Enter") toggle(focus);
    else if (event.key === "Delete" || event.key === "Backspace") writeList(without(focus));
    else if (event.key === "Home") focusOn(0);
    else if (event.key === "End") focusOn(shown.blocks - 1);
    else if (step && event.shiftKey) focusOn(focus + step);
    else if (step) carry(step);
    else return;
    event.preventDefault();
    event.stopPropagation(); // Delete would remove the node
  });

  let drag = null; // {block, moved}
  strip.addEventListener("pointerdown", (event) => {
    const block = blockAt(strip, event);
    if (event.button !== 0 || block === undefined) return;
    event.stopPropagation(); // the node stays where it is
    strip.setPointerCapture(event.pointerId);
    drag = { block, moved: false };
  });
  strip.addEventListener("pointermove", (event) => {
    const block = drag && blockAt(strip, event);
    if (!drag || block === undefined || block === drag.block) return;
    drag.moved = true;
    if (!isTarget(drag.block) || isTarget(block)) return;
    move(drag.block, block);
    focusOn(block);
    drag.block = block;
  });
  strip.addEventListener("pointerup", () => {
    if (drag && !drag.moved) toggle(drag.block);
    drag = null;
  });
  strip.addEventListener("pointercancel", () => (drag = null));

  after(node, "onExecuted", (output) => (ran = output?.specar_schedule?.[0] ?? ran));
  const timer = setInterval(refresh, INTERVAL);
  after(node, "onRemoved", () => clearInterval(timer));
}

function button(text, title, onClick) {
  const element = create("button", { type: "button", title }, text);
  element.addEventListener("click", onClick);
  return element;
}

const sorted = (targets) => [...targets].sort((a, b) => a - b);

/** The values that decide a schedule. */
function read(node) {
  const { seconds, blocks, policy, k, positions, width } = Object.fromEntries(
    node.widgets.map((widget) => [widget.name, widget.value]),
  );
  const linked = ["seconds", "blocks", "policy", "k", "positions"].some((name) => isLinked(node, name));
  return { seconds, blocks, policy, k, positions, width, linked, backbone: backbone(node), timeline: timeline(node) };
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

function placed({ policy, k, positions }, blocks, cues, pair, ran) {
  if (policy === "list") {
    return {
      targets: parsePositions(positions, blocks),
      why: `positions must be blocks from 0 to ${blocks - 1}: 0,5,10`,
    };
  }
  if (policy === "keyed") {
    const marks = cues.slice(1).map((cue) => cue.block);
    return { targets: keyed(k, marks, blocks), why: `${k} target blocks are too few for block 0 and each new prompt` };
  }
  const [name, number] = policy === "auto" ? (pair?.auto[blocks - 1] ?? "").split(":") : [policy, k];
  const told = ran?.policy === `${name}:${number}` ? ran.targets : null;
  return {
    targets: place(name, Number(number), blocks) ?? told,
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

function cells({ blocks, targets }, focus) {
  const run = longestDraftRun(targets, blocks);
  const over = run.length > bound(blocks, targets.length);
  const roles = Array.from({ length: blocks }, () => "drafter");
  for (const target of targets) roles[target] = "target";
  return roles.map((role, block) => ({
    role: "checkbox",
    class: over && block >= run.start && block < run.start + run.length ? `${role} over` : role,
    title: `block ${block}: ${role}`,
    "aria-label": `block ${block}, ${role}`,
    "aria-checked": role === "target",
    tabindex: block === focus ? 0 : -1,
  }));
}

function scattered(blocks, k) {
  const others = Array.from({ length: blocks - 1 }, (_, i) => i + 1);
  const chosen = Array.from(
    { length: Math.min(k, blocks) - 1 },
    () => others.splice(Math.floor(Math.random() * others.length), 1)[0],
  );
  return [0, ...chosen];
}

/** The block under the pointer, or nearest to it where the pointer has left the strip. */
function blockAt(strip, event) {
  const { left, right, top, bottom } = strip.getBoundingClientRect();
  const clamp = (value, low, high) => Math.min(Math.max(value, low + 1), high - 1);
  const element = document.elementFromPoint(clamp(event.clientX, left, right), clamp(event.clientY, top, bottom));
  const cell = element?.closest("[data-block]");
  return strip.contains(cell) ? Number(cell.dataset.block) : undefined;
}
