// A strip of blocks, a cell each, on which target blocks are placed with the pointer or the keyboard.
// The race page has a copy of this file and of schedule.js (specar_core/race): tests/test_race.py keeps them equal.

import { bound, longestDraftRun } from "./schedule.js";

export const KEYS =
  "Arrow keys move a target block, with Shift only the focus. Space makes a block a target or a drafter block. " +
  "Home and End go to the first and the last block.";

export function create(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Fills a strip with cells that have these attributes. Cells stay what they are, so that one keeps the focus. */
export function fill(strip, cells) {
  strip.style.setProperty("--blocks", cells.length);
  while (strip.children.length > cells.length) strip.lastChild.remove();
  while (strip.children.length < cells.length) strip.append(create("span", { "data-block": strip.children.length }));
  cells.forEach((attributes, block) => {
    for (const [name, value] of Object.entries(attributes)) strip.children[block].setAttribute(name, value);
  });
}

/** Lets a user place target blocks on a strip; place(targets) is told where, in order. Returns show(targets, blocks). */
export function placing(strip, place) {
  let targets = [];
  let blocks = 0;
  let focus = 0; // the block that the Tab key reaches
  let drag = null; // {block, moved}

  const isTarget = (block) => targets.includes(block);
  const without = (block) => targets.filter((target) => target !== block);
  const put = (wanted) => place([...wanted].sort((a, b) => a - b));
  const toggle = (block) => put(isTarget(block) ? without(block) : [...targets, block]);
  const move = (from, to) => put([...without(from), to]);

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
    if (to < 0 || to >= blocks) return;
    if (isTarget(focus)) move(focus, to);
    focusOn(to);
  }

  strip.addEventListener("focusin", (event) => focusOn(Number(event.target.dataset.block)));
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if (event.key === " " || event.key === "Enter") toggle(focus);
    else if (event.key === "Delete" || event.key === "Backspace") put(without(focus));
    else if (event.key === "Home") focusOn(0);
    else if (event.key === "End") focusOn(blocks - 1);
    else if (step && event.shiftKey) focusOn(focus + step);
    else if (step) carry(step);
    else return;
    event.preventDefault();
    event.stopPropagation(); // Delete would remove a node
  });
  strip.addEventListener("pointerdown", (event) => {
    const block = blockAt(strip, event);
    if (event.button !== 0 || block === undefined) return;
    event.stopPropagation(); // a node stays where it is
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

  return (shown, count) => {
    [targets, blocks, focus] = [shown, count, Math.min(focus, count - 1)];
    const run = longestDraftRun(targets, blocks);
    const over = run.length > bound(blocks, targets.length);
    const cells = Array.from({ length: blocks }, (_, block) => ({
      role: "checkbox",
      class: over && block >= run.start && block < run.start + run.length ? "drafter over" : "drafter",
      title: `block ${block}: drafter`,
      "aria-label": `block ${block}, drafter`,
      "aria-checked": false,
      tabindex: block === focus ? 0 : -1,
    }));
    for (const block of targets)
      Object.assign(cells[block], {
        class: "target",
        title: `block ${block}: target`,
        "aria-label": `block ${block}, target`,
        "aria-checked": true,
      });
    fill(strip, cells);
  };
}

/** Block 0, and k - 1 others anywhere. */
export function scattered(blocks, k) {
  const others = Array.from({ length: blocks - 1 }, (_, i) => i + 1);
  const drawn = () => others.splice(Math.floor(Math.random() * others.length), 1)[0];
  return [0, ...Array.from({ length: Math.min(k, blocks) - 1 }, drawn)];
}

/** The block under the pointer, or nearest to it where the pointer has left the strip. */
function blockAt(strip, event) {
  const { left, right, top, bottom } = strip.getBoundingClientRect();
  const clamp = (value, low, high) => Math.min(Math.max(value, low + 1), high - 1);
  const element = document.elementFromPoint(clamp(event.clientX, left, right), clamp(event.clientY, top, bottom));
  const cell = element?.closest("[data-block]");
  return strip.contains(cell) ? Number(cell.dataset.block) : undefined;
}
