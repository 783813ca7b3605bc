// The race page. Every number is computed from the reports of the clips.

import { create, placing, scattered } from "./placing.js";
import { bound, longestDraftRun, place, spread } from "./schedule.js";

const { clips, scenes } = JSON.parse(document.getElementById("race-data").textContent);
const $ = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const blocksOf = (count) => `${count} ${count === 1 ? "block" : "blocks"}`;
const seconds = (value) => `${value.toFixed(value < 100 ? 2 : 0)} s`;
const ORDINALS = ["1st", "2nd", "3rd"];

// ------------------------------------------------------------------------------------------- what a report says

/** ends: when each block was there, counted from the first step; finish: when the file was whole. Loading the models and
 *  encoding the prompt come before a race. */
function measured({ label, video, starts, report }) {
  const { blocks, timings, fps } = report;
  let end = 0;
  const ends = blocks.map((block) => (end += block.seconds));
  // After an interruption timings are those of the last process, and only the blocks' own seconds tell of all.
  const resumed = report.resumed_at ?? null;
  const finish = resumed === null ? Math.max(end, timings.total - timings.load - timings.text) : end;
  const targets = blocks.filter((block) => block.role === "target").map((block) => block.index);
  const frames = starts.at(-1);
  const rejected = sum(blocks.map((block) => block.rejected));
  const rate = frames / finish;
  return { label, video, starts, report, blocks, ends, finish, targets, frames, rejected, fps, rate, resumed };
}

/** Mean seconds of a block by its role and the role before it, and of what comes after the last block. What a router
 *  spends beside that does not count: its scores, and blocks with a rejected draft. */
function costsOf(racers) {
  const found = {};
  for (const { blocks } of racers) {
    blocks.forEach(({ role, seconds, rejected, score_seconds: scoring = 0 }, i) => {
      if (rejected) return;
      for (const kind of [role, `${i ? blocks[i - 1].role : ""} ${role}`]) (found[kind] ??= []).push(seconds - scoring);
    });
  }
  const means = Object.fromEntries(Object.entries(found).map(([kind, all]) => [kind, sum(all) / all.length]));
  const whole = racers.filter(({ resumed }) => resumed === null);
  return { means, end: sum(whole.map(({ finish, ends }) => finish - ends.at(-1))) / (whole.length || 1) };
}

/** Seconds that a placement would take; null if one of its roles was never measured. */
function predict({ means, end }, targets, blocks) {
  let total = end;
  let before = "";
  for (let block = 0; block < blocks; block++) {
    const role = targets.includes(block) ? "target" : "drafter";
    const cost = means[`${before} ${role}`] ?? means[role];
    if (cost === undefined) return null;
    total += cost;
    before = role;
  }
  return total;
}

// ----------------------------------------------------------------------------------------------------- the lanes

let racers = []; // of the scene: what was measured, with the elements that show it
let mode = "race";
let elapsed = 0; // seconds since the start of the race
let running = false;
let stamp = 0; // of the last animation frame

function addLane(racer, number, slowest) {
  const { report, blocks, starts, finish, targets, frames, rejected, rate, ends, resumed } = racer;
  const video = create("video", { src: racer.video, preload: "auto", playsinline: "", tabindex: -1 });
  video.muted = true;
  const state = create("p");
  const screen = create("div", { class: "screen", style: `aspect-ratio: ${report.width} / ${report.height}` }, video, state);
  const place = create("span", { class: "place", hidden: "" });
  const pace = create("ol", { class: "pace", "aria-label": `blocks of ${racer.label}` });
  blocks.forEach(({ index, role, seconds: taken, rejected: drafts }) => {
    const told = `block ${index}: ${role}, ${taken.toFixed(2)} s` + (drafts ? `, ${drafts} rejected` : "");
    const part = `--part: ${taken / slowest}`;
    pace.append(
      create("li", { class: drafts ? `${role} rejected` : role, style: part, title: told, "aria-label": told }),
    );
  });
  const rest = finish - ends.at(-1);
  const after = resumed === null ? `${seconds(rest)} to finish the file` : "not measured: the run was interrupted";
  pace.append(create("li", { class: "rest", style: `--part: ${rest / slowest}`, title: after, "aria-label": after }));
  pace.addEventListener("click", (event) => {
    const block = [...pace.children].indexOf(event.target);
    if (mode === "frame" && block in blocks) seek(starts[block]);
  });
  const facts = create("dl", { class: "facts" });
  for (const [name, value, small] of [
    ["finished in", seconds(finish), ""],
    ["speed", rate.toFixed(1), " fps"],
    ["first frame", seconds(ends[0]), ""],
    ["by the target", targets.length, ` of ${blocks.length}`],
    ["longest draft run", ...blocksOf(longestDraftRun(targets, blocks.length).length).split(/(?= )/)],
    ["rejected drafts", rejected, ""],
  ]) {
    facts.append(
      create("div", {}, create("dt", {}, name), create("dd", {}, `${value}`, ...(small ? [create("small", {}, small)] : []))),
    );
  }
  const title = create("h3", {}, create("span", { class: `key c${number % 6}` }, racer.label), place);
  const lane = create("article", { class: "lane" }, title, screen, facts, pace);
  if (resumed !== null) {
    lane.append(create("p", { class: "hint" }, `Interrupted before block ${resumed} and resumed: the seconds of its blocks, added up.`));
  }
  screen.addEventListener("click", () => $("go").click());
  $("lanes").append(lane);
  Object.assign(racer, { element: lane, player: video, screen, state, place, pace, facts });
  video.addEventListener("error", () => {
    state.textContent = `cannot play ${racer.video.slice(0, 80)}`;
    screen.classList.add("waiting");
  });
}

/** How many blocks are there after so many seconds. */
const finishedBlocks = ({ ends }, time) => ends.filter((end) => end <= time + 1e-9).length;

function showRace() {
  $("clock").textContent = `${elapsed.toFixed(elapsed < 100 ? 2 : 1)} s`;
  for (const racer of racers) {
    const { element, starts, finish, fps, frames, player, screen, state, place, pace } = racer;
    const blocks = finishedBlocks(racer, elapsed);
    const available = starts[blocks] / fps;
    const done = elapsed >= finish;
    const current = player.currentTime;
    screen.classList.toggle("waiting", !blocks);
    screen.classList.toggle("ready", !running && !elapsed);
    if (!blocks) state.textContent = running || elapsed ? "generating the first block" : "ready";
    else if (done) state.textContent = `finished, ${seconds(finish)}`;
    else state.textContent = `${starts[blocks]} of ${frames} frames`;
    [...pace.children].forEach((cell, block) => cell.classList.toggle("there", block < blocks));
    place.hidden = !done;
    element.classList.toggle("racing", !done && (running || elapsed > 0));
    // The player never passes what is generated; the last frame of that stays on the screen.
    const last = available - 1 / fps;
    if (running && blocks && player.paused && !player.ended && current < last) player.play().catch(() => {});
    else if (!player.paused && ((!done && current >= last) || !running)) player.pause();
    if (!done && current > available) player.currentTime = Math.max(0, last);
  }
}

function showPlaces() {
  [...racers]
    .sort((a, b) => a.finish - b.finish)
    .forEach(({ place }, rank) => {
      place.textContent = ORDINALS[rank] ?? `${rank + 1}th`;
      place.classList.toggle("first", !rank);
    });
}

function tick(now) {
  const passed = stamp ? Math.min(0.25, (now - stamp) / 1000) : 0;
  stamp = now;
  if (running && mode === "race") {
    elapsed = Math.min(slowest(), elapsed + passed * Number($("rate").value));
    showRace();
    const over = elapsed >= slowest() && racers.every(({ player }) => player.ended || player.error);
    if (elapsed >= slowest() && !$("result").textContent) announce();
    if (over) setRunning(false);
  } else if (running) follow();
  if (running) requestAnimationFrame(tick);
}

const slowest = () => Math.max(...racers.map(({ finish }) => finish));

function announce() {
  const [first, ...others] = [...racers].sort((a, b) => a.finish - b.finish);
  const ahead = others.map((racer) => `${(racer.finish / first.finish).toFixed(2)} times as fast as ${racer.label}`);
  $("result").textContent = others.length ? `${first.label} is first: ${ahead.join(", ")}.` : "";
}

function setRunning(wanted) {
  running = wanted;
  stamp = 0;
  const again = mode === "race" && elapsed >= slowest();
  $("go").textContent = running ? "Pause" : mode === "frame" ? "Play" : again ? "Again" : elapsed ? "Go on" : "Start";
  if (running) requestAnimationFrame(tick);
  else for (const { player } of racers) player.pause();
}

function restart() {
  elapsed = 0;
  $("result").textContent = "";
  for (const { player } of racers) player.currentTime = 0;
}

$("go").addEventListener("click", () => {
  if (running) return setRunning(false), mode === "frame" && seek(Number($("frame").value));
  if (mode === "race" && elapsed >= slowest()) restart();
  if (mode === "frame" && Number($("frame").value) >= Number($("frame").max)) seek(0);
  setRunning(true);
  if (mode === "frame") playAll();
});
function playAll() {
  for (const { player } of racers) player.play().catch(() => {});
}

$("rate").addEventListener("change", setRate);
document.addEventListener("keydown", (event) => {
  if (event.key !== " " || event.target !== document.body) return;
  event.preventDefault(); // the page would scroll
  $("go").click();
});

function setRate() {
  for (const { player } of racers) player.playbackRate = Number($("rate").value);
}

// ------------------------------------------------------------------------------------------------ the same frame

/** All players show this frame: its middle, so that rounding cannot show another one. */
function seek(frame) {
  $("frame").value = frame;
  for (const racer of racers) {
    const own = Math.min(frame, racer.frames - 1);
    racer.player.currentTime = (own + 0.5) / racer.fps;
    racer.screen.classList.remove("waiting", "ready");
  }
  showFrame();
}

function showFrame() {
  const frame = Number($("frame").value);
  const text = `frame ${frame} of ${Number($("frame").max) + 1}`;
  $("clock").textContent = `${(frame / racers[0].fps).toFixed(2)} s`;
  $("frame").setAttribute("aria-valuetext", text);
  for (const racer of racers) {
    const block = racer.starts.findLastIndex((start) => start <= frame);
    const known = racer.blocks[block];
    racer.state.textContent = known ? `frame ${frame}: block ${block}, ${known.role}` : "the end";
    [...racer.pace.children].forEach((cell, i) => cell.classList.toggle("now", i === block && !!known));
  }
}

/** While they play, the longest one tells the frame, and one that is out of step is put right. */
function follow() {
  const leader = racers.reduce((a, b) => (b.frames > a.frames ? b : a));
  const time = leader.player.currentTime;
  for (const { player, fps } of racers) {
    if (!player.ended && Math.abs(player.currentTime - time) > 2 / fps) player.currentTime = time;
  }
  $("frame").value = Math.min(leader.frames - 1, Math.floor(time * leader.fps + 1e-6));
  showFrame();
  if (!leader.player.ended) return;
  if (!$("loop").checked) return setRunning(false);
  seek(0);
  playAll();
}

$("frame").addEventListener("input", () => {
  setRunning(false);
  seek(Number($("frame").value));
});

function setMode(wanted) {
  mode = wanted;
  setRunning(false);
  $("scrubber").hidden = $("looping").hidden = mode === "race";
  for (const { element, place, pace } of racers) {
    element.classList.remove("racing");
    place.hidden = mode === "race";
    pace.classList.toggle("jump", mode === "frame");
    for (const [block, cell] of [...pace.children].entries()) {
      cell.classList.remove("now");
      cell.classList.toggle("there", mode === "frame" && block < pace.children.length - 1);
    }
  }
  if (mode === "frame") seek(Number($("frame").value));
  else {
    restart();
    setRunning(false);
    showRace();
  }
}

for (const input of document.getElementsByName("mode")) input.addEventListener("change", () => setMode(input.value));

// --------------------------------------------------------------------------------------------------- the explorer

let placed = []; // the target blocks
let length = 0; // blocks
let costs = null;
const drawStrip = placing($("strip"), setPlacement);

function setPlacement(targets) {
  placed = targets;
  const run = longestDraftRun(placed, length).length;
  const least = bound(length, placed.length);
  drawStrip(placed, length);
  const time = predict(costs, placed, length);
  const told = [
    ["by the target", `${placed.length} of ${length}`, "", "targets"],
    ["longest draft run", blocksOf(run), run > least ? "over" : "", "run"],
    ["the least so many can promise", placed[0] === 0 ? blocksOf(least) : "none: the drafter begins", "", "bound"],
    ["predicted time", time === null ? "not measured" : seconds(time), "", "time"],
  ];
  $("facts").replaceChildren(
    ...told.map(([name, value, style, id]) =>
      create("div", {}, create("dt", {}, name), create("dd", { class: style, "data-fact": id }, value)),
    ),
  );
  const widest = Math.max(slowest(), time ?? 0);
  const bar = (label, value, kind) =>
    create("div", { class: `bar ${kind}` }, create("span", {}, label), create("i", { style: `--part: ${value / widest}` }), create("span", {}, seconds(value)));
  $("bars").replaceChildren(
    ...(time === null ? [] : [bar("this placement", time, "predicted")]),
    ...racers.map((racer) => bar(racer.label, racer.finish, "")),
  );
}

function showButtons() {
  const some = () => Math.max(1, placed.length);
  const button = (text, title, place) => {
    const element = create("button", { type: "button", title }, text);
    element.addEventListener("click", () => setPlacement(place()));
    return element;
  };
  $("placements").replaceChildren(
    button("Spread", "Even distances: the shortest draft runs", () => spread(length, some())),
    button("Cluster", "All at the front", () => place("front", some(), length)),
    button("Scatter", "Block 0, and the others anywhere", () => scattered(length, some())),
    button("One less", "Evenly spread", () => spread(length, Math.max(1, placed.length - 1))),
    button("One more", "Evenly spread", () => spread(length, Math.min(length, placed.length + 1))),
    ...racers.map((racer) => button(`As in ${racer.label}`, "What was run", () => racer.targets)),
  );
}

// ------------------------------------------------------------------------------------------------------ a scene

const promptOf = ({ report }) => (report.prompts ?? []).map(({ text }) => text).join(" · ");

function showScene(number) {
  setRunning(false);
  racers = scenes[number].map((index) => measured(clips[index]));
  const [{ report, frames, fps }] = racers;
  const prompt = promptOf(racers[0]);
  $("prompt").textContent = prompt || "the same prompt, seed and noise";
  $("prompt").classList.toggle("long", prompt.length > 110);
  const { environment, width, height, backbone, seed } = report;
  const told = [`${backbone}, ${width}x${height}`, `${frames} frames, ${(frames / fps).toFixed(1)} s at ${fps} fps`];
  if (environment) told.push(`${environment.device}, ${environment.precision}`);
  $("meta").textContent = [...told, `seed ${seed}`, "models loaded, prompt encoded"].join(" · ");
  $("lanes").replaceChildren();
  racers.forEach((racer, number) => addLane(racer, number, slowest()));
  showPlaces();
  $("frame").max = Math.max(...racers.map((racer) => racer.frames)) - 1;
  $("frame").value = 0;
  setRate();
  showNumbers();
  length = racers[0].blocks.length;
  costs = costsOf(racers);
  const kinds = ["target", "drafter"].filter((role) => costs.means[role] !== undefined);
  const parts = kinds.map((role) => `${costs.means[role].toFixed(3)} s a ${role} block`);
  $("costs").textContent = `Measured here: ${parts.join(", ")}, ${costs.end.toFixed(3)} s after the last block.`;
  showButtons();
  setPlacement(racers.find(({ targets }) => targets.length < length)?.targets ?? racers[0].targets);
  for (const scores of document.querySelectorAll("[data-scores]")) scores.hidden = scores.dataset.scores !== `${number}`;
  setMode(mode);
}

function showNumbers() {
  const columns = {
    "": ({ label }) => label,
    "finished in": ({ finish }) => seconds(finish),
    fps: ({ rate }) => rate.toFixed(2),
    "against the slowest": ({ finish }) => `${(slowest() / finish).toFixed(2)}×`,
    "before it has played": ({ finish, frames, fps }) => (finish < frames / fps ? "yes" : "no"),
    "first frame": ({ ends }) => seconds(ends[0]),
    "largest gap": ({ blocks }) => seconds(Math.max(...blocks.map((block) => block.seconds))),
    "target blocks": ({ targets, blocks }) => `${targets.length} of ${blocks.length}`,
    "longest draft run": ({ targets, blocks }) => `${longestDraftRun(targets, blocks.length).length}`,
    "rejected drafts": ({ rejected }) => `${rejected}`,
  };
  const head = create("tr", {}, ...Object.keys(columns).map((name) => create("th", { scope: "col" }, name)));
  const rows = racers.map((racer) =>
    create("tr", {}, ...Object.values(columns).map((value) => create("td", {}, value(racer)))),
  );
  $("table").replaceChildren(create("thead", {}, head), create("tbody", {}, ...rows));
}

$("scene-picker").hidden = scenes.length < 2;
$("scene").append(
  ...scenes.map(([first], number) => {
    const { report } = clips[first];
    const text = promptOf(clips[first]) || `scene ${number + 1}`;
    return create("option", { value: number }, `${text.slice(0, 90)}${text.length > 90 ? "…" : ""}, seed ${report.seed}`);
  }),
);
$("scene").addEventListener("change", () => showScene(Number($("scene").value)));
showScene(0);
