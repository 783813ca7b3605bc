"""Scores of finished videos: each is read with its report, and compared with the target-only one among them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import __version__
from .backbones import backbone
from .errors import SpecarError, UsageError
from .foreign import VIDEO, fits, load
from .measures import Frame, Layout, Track, fidelity, measure, read_frames
from .metrics import Json, by_kind, by_position, curve, drift, flicker, health, paired, seams
from .mp4 import read_metadata
from .progress import Progress

SCHEMA = 1
# What two videos have in common whose frames may be compared one by one.
SAME = ("backbone", "prompts", "conditioning", "seed", "width", "height", "frames", "sampling", "options")


@dataclass(frozen=True)
class Video:
    path: Path
    report: Json
    layout: Layout
    block_frames: int

    @property
    def size(self) -> tuple[int, int]:
        return self.report["width"], self.report["height"]

    @property
    def target_only(self) -> bool:
        return set(self.layout.roles) == {"target"}

    def same_rollout(self, other: "Video") -> bool:
        return all(self.report.get(name) == other.report.get(name) for name in SAME)

    def frames(self, what: str, progress: Progress) -> Iterator[Frame]:
        for done, frame in enumerate(read_frames(self.path), 1):
            yield frame
            progress(f"{what} {self.path.name}", done, self.layout.frames)


def report_of_video(path: Path) -> Json:
    """What a video says of itself, or the FILE.json beside it. Raises UsageError if there is neither."""
    if not path.is_file():
        raise UsageError(f"there is no video {path}")
    try:
        text = read_metadata(path).get("specar") or path.with_suffix(".json").read_text("utf-8")
        report = load(text)
        if fits(report, VIDEO) and report["blocks"] and report["frames"]:
            return report
    except (SpecarError, OSError, ValueError):
        pass
    raise UsageError(f"{path} has no report of SpecAR in it, nor {path.with_suffix('.json').name} beside it")


def read_video(path: Path, report: Json | None = None) -> Video:
    """report: the video's, if it is known from elsewhere."""
    report = report or report_of_video(path)
    geometry = backbone(report["backbone"]).geometry
    layout = Layout.of(report, geometry)
    if list(layout.starts) != sorted(set(layout.starts)):
        raise UsageError(f"{path} has no report of SpecAR in it that agrees with itself")
    return Video(path, report, layout, geometry.later_frames)


def score(
    paths: Sequence[Path],
    progress: Progress = lambda what, done, total: None,
    reports: Sequence[Json | None] | None = None,
) -> Json:
    """Scores of each video, and of each policy over all of its videos; reports: theirs, if they are known. Raises
    UsageError for one without a report, SpecarError for one that is damaged or has not the frames that its report says.
    """
    videos = [read_video(path, told) for path, told in zip(paths, reports or [None] * len(paths), strict=True)]
    tracks = []
    for video in videos:
        with _named(video):
            tracks.append(measure(video.frames("measuring", progress), video.layout))
    clips = []
    for video, track in zip(videos, tracks, strict=True):
        others = (index for index, other in enumerate(videos) if other.target_only and other.same_rollout(video))
        found = None if video.target_only else next(others, None)
        reference = None if found is None else (videos[found], tracks[found])
        clips.append(_clip(video, track, reference, progress))
    return {"schema": SCHEMA, "version": __version__, "clips": clips, "policies": _policies(videos, tracks)}


@contextmanager
def _named(video: Video) -> Iterator[None]:
    try:
        yield
    except SpecarError as error:
        raise SpecarError(f"{video.path}: {error}") from error


def _clip(video: Video, track: Track, reference: tuple[Video, Track] | None, progress: Progress) -> Json:
    layout, report = video.layout, video.report
    boundaries, means = seams(track, layout), track.block_means(layout)
    told: Json = {
        "video": video.path.name,
        "source": "mp4",
        "backbone": report["backbone"],
        "prompts": report["prompts"],
        "seed": report["seed"],
        "fps": report["fps"],
        "schedule": report["schedule"],
        "roles": list(layout.roles),
        "starts": list(layout.starts),
        "cuts": list(layout.cuts),
        "frames": {name: _short(values) for name, values in track.measures.items()},
        "differences": _short(track.differences),
        "blocks": {
            name: {"mean": _short(values), "relative": _short(values - values[0])} for name, values in means.items()
        },
        "boundaries": boundaries,
        "health": health(track, layout, reference[1] if reference else None),
        "seams": by_kind(boundaries),
        "drift": drift(track, layout),
        "flicker": flicker(track, layout, _periods(video)),
        "run_position": {name: curve(samples) for name, samples in by_position(track, layout).items()},
        "paired": None,
    }
    if reference:
        other, wanted = reference
        with _named(video):
            psnr, ssim = fidelity(video.frames("comparing", progress), read_frames(other.path), layout)
        told["paired"] = {"reference": other.path.name, **paired(psnr, ssim, track, wanted, layout)}
    return told


def _short(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _periods(video: Video) -> dict[str, int]:
    """Periods in frames at which rollouts are known to pulse."""
    periods = {"block": video.block_frames}
    if rolling := re.match(r"rolling:(\d+)", str(video.report["options"].get("drafter_context"))):
        periods["context window"] = 4 * int(rolling[1])  # latent frames
    return periods


def _policies(videos: Sequence[Video], tracks: Sequence[Track]) -> list[Json]:
    """The run-position curves of each policy. Where it has several videos, they are what the bootstrap resamples."""
    found = []
    for policy in dict.fromkeys(video.report["schedule"]["policy"] for video in videos):
        of_clips = [
            by_position(track, video.layout)
            for video, track in zip(videos, tracks, strict=True)
            if video.report["schedule"]["policy"] == policy
        ]
        curves = {}
        for name in of_clips[0]:
            samples = [
                (clip if len(of_clips) > 1 else run, position, difference)
                for clip, measured in enumerate(of_clips)
                for run, position, difference in measured[name]
            ]
            curves[name] = curve(samples)
        found.append({"policy": policy, "clips": len(of_clips), "run_position": curves})
    return found


def problems(scores: Json) -> list[str]:
    return [f"{clip['video']}: {problem}" for clip in scores["clips"] for problem in clip["health"]["problems"]]


def rows(scores: Json) -> list[dict[str, str]]:
    """The comparison, a row for each video: what is written is the same in the table and on the race page."""
    found = []
    for clip in scores["clips"]:
        kinds, measured, pair = clip["seams"]["kinds"], clip["drift"]["measures"], clip["paired"]
        changed = [value for value in pair["psnr"] if value != "inf"] if pair else []
        found.append(
            {
                "video": clip["video"],
                "policy": clip["schedule"]["policy"],
                "targets": f"{clip['roles'].count('target')} of {len(clip['roles'])}",
                "seam excess": _number(clip["seams"]["excess"]),
                **{f"seam {kind}": _number(kinds[kind]["median"]) for kind in kinds},
                "visible": str(sum(len(kinds[kind]["visible"]) for kind in kinds)),
                **{f"drift {name}": _number(measured[name]["signed"], "+") for name in ("luma", "saturation")},
                "sharpness": _number(measured["sharpness"]["signed"], "+"),
                "flicker": _number(clip["flicker"]["flicker"], digits=4),
                "PSNR": _number(min(changed), digits=3) if changed else "inf" if pair else "-",
                "SSIM": _number(min(pair["ssim"])) if pair else "-",
            }
        )
    return found


def table(scores: Json) -> str:
    lines = [list(rows(scores)[0]), *(list(row.values()) for row in rows(scores))]
    return "\n".join([*aligned(lines), "", *LEGEND])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as text, the cells of a column below one another."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


LEGEND = (
    "seam: the step across a boundary against the usual one beside it; excess: hand-overs against the drafter's own",
    "visible: boundaries above 1.5; drift, sharpness: last 15 % of the frames minus the first",
    "PSNR, SSIM: the worst block against the target-only video of the same seed; likeness to one rollout, no quality",
)


def _number(value: float | None, sign: str = "", digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.0f}" if abs(value) >= 100 else f"{value:{sign}.{digits}g}"
