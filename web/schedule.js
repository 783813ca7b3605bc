// Where target blocks go and what that means, as specar_core computes it: all that the page has to know by itself.
// tests/browser/test_page_schedule.py holds every function here to the Python.

const range = (start, end, step = 1) =>
  Array.from({ length: Math.max(0, Math.ceil((end - start) / step)) }, (_, i) => start + i * step);

export const spread = (blocks, k) => Array.from({ length: k }, (_, i) => Math.floor((i * blocks) / k));

const PLACES = {
  "target-only": (blocks) => range(0, blocks),
  "draft-only": () => [],
  first: () => [0],
  spread: (blocks, k) => spread(blocks, Math.min(k, blocks)),
  front: (blocks, k) => range(0, Math.min(k, blocks)),
  back: (blocks, k) => (k ? [0, ...range(Math.max(1, blocks - k + 1), blocks)] : []),
  stride: (blocks, step) => (step ? range(0, blocks, step) : null),
  "max-run": (blocks, run) => spread(blocks, Math.ceil(blocks / (run + 1))),
};

/** The target blocks of a policy with its number, in order; null where only the run can tell. */
export function place(policy, number, blocks) {
  const where = PLACES[policy];
  return where && (where.length < 2 || Number.isInteger(number)) ? where(blocks, number) : null;
}

/** The target blocks that a text lists, in order; null if it does not list blocks of this video. */
export function parsePositions(text, blocks) {
  const items = text.split(",").map((item) => item.trim());
  const targets = [...new Set(items.map(Number))].sort((a, b) => a - b);
  return items.every((item) => /^\+?\d+$/.test(item)) && targets.at(-1) < blocks ? targets : null;
}

/** Where the longest draft run begins, and how many blocks it has. */
export function longestDraftRun(targets, blocks) {
  let longest = { start: 0, length: 0 };
  [...targets, blocks].forEach((end, i, ends) => {
    const start = i ? ends[i - 1] + 1 : 0;
    if (end - start > longest.length) longest = { start, length: end - start };
  });
  return longest;
}

/** The longest draft run that k target blocks can promise, block 0 being one of them. */
export const bound = (blocks, k) => Math.ceil(blocks / k) - 1;
