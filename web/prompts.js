// Prompts over time, snapped to blocks as specar_core/timeline.py does it, and what follows for a schedule: where cuts
// make a video shorter, and where the policy `keyed` puts its target blocks.
// tests/browser/test_page_prompts.py holds every function here to the Python.

const LINE = /^(\d+(?:\.\d+)?)\s*s?((?:\s+(?:cut|fade\s+\d+(?:\.\d+)?\s*s?))*)\s*:(?!\d\d\b)\s*(.+)$/i;

/** [{seconds, text, fade, cut}] of a timeline; null where the node will refuse it. */
export function parseTimeline(text) {
  const lines = text.split("\n").map((line) => line.trim());
  const found = lines.filter((line) => line && !line.startsWith("#")).map((line) => LINE.exec(line));
  if (!found.length || found.includes(null)) return null;
  const shots = found.map(([, seconds, how, text]) => ({
    seconds: Number(seconds),
    text,
    fade: Number(/fade\s+([\d.]+)/i.exec(how)?.[1] ?? 0),
    cut: /cut/i.test(how),
  }));
  return shots.every(({ seconds }, i) => (i ? seconds > shots[i - 1].seconds : seconds === 0)) ? shots : null;
}

/** Frames of a video some of whose blocks begin a new clip. */
export function framesWithCuts(blocks, pair, cuts) {
  if (!blocks) return 0;
  const begun = cuts.filter((cut) => cut < blocks).length;
  return pair.first_frames + (blocks - 1 - begun) * pair.later_frames + begun * pair.clip_frames;
}

function blocksForFrames(wanted, pair, cuts) {
  let blocks = 1 + Math.max(0, Math.ceil((wanted - pair.first_frames) / pair.later_frames));
  while (framesWithCuts(blocks, pair, cuts) < wanted) blocks++;
  return blocks;
}

export const blocksWithCuts = (seconds, pair, cuts) => blocksForFrames(Math.ceil(seconds * pair.fps - 1e-9), pair, cuts);

/** [{block, text, fade, cut}]: the shots of a timeline at the blocks whose beginnings are nearest. */
export function snap(shots, pair) {
  const cues = [];
  for (const shot of shots) {
    const cuts = cutsOf(cues);
    const frame = shot.seconds * pair.fps;
    const after = blocksForFrames(Math.max(1, Math.ceil(frame)), pair, cuts);
    const distance = (block) => Math.abs(framesWithCuts(block, pair, cuts) - frame);
    const block = distance(after - 1) <= distance(after) ? after - 1 : after;
    let cut = shot.cut && cues.length > 0;
    const first = !cues.length;
    if (!first && cues.at(-1).block === block) cut = cues.pop().cut || cut;
    const fades = shot.fade && !first && !cut;
    const fade = fades ? Math.max(1, halfToEven((shot.fade * pair.fps) / pair.later_frames)) : 0;
    cues.push({ block, text: shot.text, fade: block ? fade : 0, cut: cut && block > 0 });
  }
  return cues;
}

export const cutsOf = (cues) => cues.filter((cue) => cue.cut).map((cue) => cue.block);

/** The target blocks of `keyed`: block 0, the marks, and the rest where they shorten the longest draft run; null if k is
 *  too small for that. */
export function keyed(k, marks, blocks) {
  const starts = [...new Set([0, ...marks])].sort((a, b) => a - b);
  const count = Math.min(k, blocks);
  if (starts.length > count) return null;
  const parts = starts.map((start, i) => ({ start, length: (starts[i + 1] ?? blocks) - start, targets: 1 }));
  const worse = (a, b) =>
    Math.ceil(a.length / a.targets) - Math.ceil(b.length / b.targets) || a.length * b.targets - b.length * a.targets;
  for (let more = count - starts.length; more > 0; more--)
    parts.reduce((worst, part) => (worse(part, worst) > 0 ? part : worst)).targets++;
  return parts.flatMap(({ start, length, targets }) =>
    Array.from({ length: targets }, (_, i) => start + Math.floor((i * length) / targets)),
  );
}

const halfToEven = (value) => (value % 1 === 0.5 ? 2 * Math.round(value / 2) : Math.round(value));
