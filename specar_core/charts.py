"""Scores as pictures: SVG that takes its colours from the page around it, so that it suits light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .metrics import VISIBLE, Json
from .score import LEGEND, rows

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 30
COLOURS = 6  # the page has this many, as classes c0, c1, ...
MARKS = {"DT": "M0-4.5 4.5 4.5H-4.5z", "TD": "M0 4.5-4.5-4.5H4.5z"}  # up to the target, down to the drafter
DOT = "M-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0z"
STYLE = """
.chart { width: 100%; height: auto; font: 11px system-ui, sans-serif; fill: currentColor; }
.chart line { stroke: currentColor; opacity: .15; }
.chart .level { opacity: .6; stroke-dasharray: 4 4; }
.chart polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.chart polygon { fill: var(--c); opacity: .18; }
.chart path, .key::before { fill: var(--c); background: var(--c); }
.key { margin-right: 1em; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .4em; border-radius: 2px; }
.charts { display: grid; gap: 1.5em 2em; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.charts figure { margin: 0; min-width: 0; }
.charts h3 { margin: .5em 0; font-size: 1em; }
.charts p, .scores + p, .scores ~ p { margin: .2em 0; opacity: .7; font-size: .85em; }
.scores { overflow-x: auto; }
.scores table { border-collapse: collapse; font-size: .85em; font-variant-numeric: tabular-nums; }
.scores :is(td, th) { padding: .35em .65em .35em 0; text-align: left; white-space: nowrap; }
.scores td { border-top: 1px solid color-mix(in srgb, currentColor 15%, transparent); }
.c0 { --c: #12907a } .c1 { --c: #8d63d9 } .c2 { --c: #c9508f }
.c3 { --c: #94902a } .c4 { --c: #6d7f92 } .c5 { --c: #a8683c }
@media (max-width: 560px) { .chart { font-size: 15px } }
"""


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one clip in its colour; marks: the shape of each point; band: its lower and upper values."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    marks: Sequence[str] = ()
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    svg: str
    keys: Sequence[tuple[str, int]]

    def html(self) -> str:
        keys = "".join(f'<span class="key c{colour % COLOURS}">{escape(name)}</span>' for name, colour in self.keys)
        caption = f"<figcaption>{keys}<p>{escape(self.note)}</p></figcaption>"
        return f"<figure><h3>{escape(self.title)}</h3>{self.svg}{caption}</figure>"


def charts(scores: Json) -> list[Chart]:
    clips = list(enumerate(scores["clips"]))
    label = dict(enumerate(labels(scores)))
    found = [
        _chart(
            "Seams",
            "▲ drafter to target, ▼ target to drafter, • the models' own; 1 is no step, by boundary",
            [
                Line(
                    label[colour],
                    colour,
                    [(boundary["block"], boundary["seam"]) for boundary in clip["boundaries"]],
                    marks=[MARKS.get(boundary["kind"], DOT) for boundary in clip["boundaries"]],
                )
                for colour, clip in clips
            ],
            levels=(1, VISIBLE),
        )
    ]
    for name in ("luma", "saturation", "sharpness"):
        lines = [Line(label[colour], colour, _numbered(clip["blocks"][name]["relative"])) for colour, clip in clips]
        found.append(_chart(f"{name.capitalize()} over time", "against block 0, by block", lines, levels=(0,)))
    positions = []
    of_policy = {clip["schedule"]["policy"]: colour for colour, clip in reversed(clips)}
    for policy in scores["policies"]:
        colour, curve = of_policy.get(policy["policy"]), policy["run_position"]["sharpness"]
        if colour is None or not curve["positions"]:  # of another scene, or without a draft behind a target
            continue
        at = [0, *curve["positions"]]
        band = list(zip([0, *curve["low"]], [0, *curve["high"]], strict=True))
        points = list(zip(at, [0, *curve["mean"]], strict=True))
        positions.append(Line(policy["policy"], colour, points, band=band))
    if positions:
        note = "sharpness against the last target block, by blocks since then, with 95 % of the resamples"
        found.append(_chart("Run position", note, positions, levels=(0,)))
    pairs = [
        Line(label[colour], colour, [(b, v) for b, v in enumerate(clip["paired"]["psnr"]) if v != "inf"])
        for colour, clip in clips
        if clip["paired"]
    ]
    if any(line.points for line in pairs):
        note = "dB against target-only, by block; likeness to one rollout, no quality; identical blocks are left out"
        found.append(_chart("PSNR", note, pairs))
    return found


def labels(scores: Json) -> list[str]:
    """A name for each clip: its policy, and its file where another clip has the same policy."""
    policies = [clip["schedule"]["policy"] for clip in scores["clips"]]
    alone = len(policies) == len(set(policies))
    return [
        policy if alone else f"{policy}, {clip['video']}"
        for policy, clip in zip(policies, scores["clips"], strict=True)
    ]


def table(scores: Json) -> str:
    lines = rows(scores)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in lines]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in lines[0])
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    legend = "".join(f"<p>{escape(line)}.</p>" for line in LEGEND)
    return f'<div class="scores"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{legend}'


def page(scores: Json) -> str:
    """One HTML page that needs nothing else."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>SpecAR scores</title>'
        '<meta name="viewport" content="width=device-width"><style>:root { color-scheme: light dark }'
        "body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }"
        f"{STYLE}</style><h1>SpecAR scores</h1>{section(scores)}</html>\n"
    )


def section(scores: Json) -> str:
    """Table and charts; the page around them brings `STYLE`."""
    return f'{table(scores)}<div class="charts">{"".join(chart.html() for chart in charts(scores))}</div>'


def _numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(block), value) for block, value in enumerate(values)]


def _round_values(low: float, high: float) -> list[float]:
    """Some in between, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * factor for factor in (5, 2, 1) if (high - low) / (power * factor) >= 4)
    return [float(f"{step * number:.12g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _chart(title: str, note: str, lines: Sequence[Line], levels: Sequence[float] = ()) -> Chart:
    points = [point for line in lines for point in line.points]
    heights = [y for _, y in points] + [y for line in lines for pair in line.band for y in pair] + list(levels)
    low, high = min(heights), max(heights)
    pad = 0.06 * (high - low) or 1.0
    low, high, last = low - pad, high + pad, max((x for x, _ in points), default=1) or 1

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / last, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 1)

    def joined(pairs: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(a)},{y(b)}" for a, b in pairs)

    parts = []
    for value in _round_values(low, high):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.10g}</text>')
    for value in levels:
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
    for number in range(0, int(last) + 1, max(1, -(-int(last) // 9))):
        parts.append(f'<text x="{x(number)}" y="{HEIGHT - 10}" text-anchor="middle">{number}</text>')
    for line in lines:
        parts.append(f'<g class="c{line.colour % COLOURS}">')
        if line.band:
            across = [point for point, _ in line.points]
            edge = [(at, pair[0]) for at, pair in zip(across, line.band, strict=True)]
            back = [(at, pair[1]) for at, pair in zip(across, line.band, strict=True)]
            parts.append(f'<polygon points="{joined(edge)} {joined(back[::-1])}"/>')
        for mark, (block, value) in zip(line.marks, line.points, strict=False):
            parts.append(f'<path d="{mark}" transform="translate({x(block)} {y(value)})"/>')
        if not line.marks:
            parts.append(f'<polyline points="{joined(line.points)}"/>')
        if len(line.points) == 1:  # is no line
            parts += [f'<path d="{DOT}" transform="translate({x(block)} {y(value)})"/>' for block, value in line.points]
        parts.append("</g>")
    opening = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}: {escape(note)}">'
    )
    return Chart(title, note, opening + "".join(parts) + "</svg>", [(line.name, line.colour) for line in lines])
