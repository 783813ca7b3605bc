"""The `specar` command. Results go to standard output, everything else to standard error.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Most imports stand where they are needed: torch alone
takes more than a second.
"""

import io
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from . import __version__
from .backbones import NAMES, backbone
from .console import Guarded, Said, say, stderr
from .earlier import merged, report_in, told_by
from .errors import SpecarError, UsageError, reason
from .examples import EXAMPLES, example
from .geometry import check_blocks
from .policies import SPECS, parse, whole
from .routers import Open

app = typer.Typer(
    name="specar",
    cls=Guarded,
    help="Long video by a drafter and a target that share one rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Option = typer.Option
PAIRS = f"The pair: {', '.join(NAMES)}. Default: krea."
BackboneName = Annotated[str, Option("--backbone", help=PAIRS, show_default=False)]
Seconds = Annotated[Optional[float], Option("--seconds", help="Length in seconds, rounded up to blocks.")]
BlockCount = Annotated[Optional[int], Option("--blocks", help="Length in blocks.")]
TargetCount = Annotated[Optional[str], Option("--k", help="How many blocks the target generates, evenly spread.")]
Spec = Annotated[Optional[str], Option("--schedule", help=f"A schedule by name: {SPECS}.")]
MaxRun = Annotated[Optional[str], Option("--max-run", help="Longest draft run, with as few target blocks as it takes.")]
Width = Annotated[Optional[int], Option("--width", help="In pixels.")]
Height = Annotated[Optional[int], Option("--height", help="In pixels.")]
PrecisionName = Annotated[
    Optional[str],
    Option("--precision", help="bf16, fp8, fp8-target (the target only) or fp32. Default: bf16 on a GPU."),
]
ModelsDir = Annotated[Optional[Path], Option("--models-dir", help="Holds diffusion_models, text_encoders and vae.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of text.")]


def version(wanted: bool) -> None:
    if wanted:
        print(f"specar {__version__}")
        raise typer.Exit


@app.callback()
def start(
    show_version: Annotated[
        bool, Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Annotated[bool, Option("--verbose", help="One line for every block.")] = False,
) -> None:
    logger = logging.getLogger("specar")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.handlers = [Said()]


def video(
    ctx: typer.Context,
    backbone_name: BackboneName = "",
    prompt: Annotated[Optional[str], Option("--prompt", help="What the video shows.")] = None,
    example_name: Annotated[Optional[str], Option("--example", help="A prompt of `specar examples`.")] = None,
    prompt_file: Annotated[
        Optional[Path], Option("--prompt-file", help="A prompt a line, but for # lines: OUT-0001.mp4 and so on.")
    ] = None,
    timeline: Annotated[
        Optional[Path],
        Option("--timeline", help="Prompts over time, a line each: 0s: TEXT, 4.5s fade 1s: TEXT, 9s cut: TEXT."),
    ] = None,
    image: Annotated[Optional[Path], Option("--image", help="The image that the video begins with.")] = None,
    video_file: Annotated[
        Optional[Path], Option("--video", help="The video that is followed (krea, tiny) or continued (helios).")
    ] = None,
    strength: Annotated[
        Optional[float], Option("--strength", help="How far from --video, more than 0 to 1. Default 0.5.")
    ] = None,
    lora: Annotated[
        Optional[list[str]],
        Option("--lora", help="[ROLE=]FILE[:STRENGTH], on both models if it fits them. May be repeated."),
    ] = None,
    seconds: Seconds = None,
    blocks: BlockCount = None,
    frames: Annotated[Optional[int], Option("--frames", help="Length in frames, rounded up to blocks.")] = None,
    width: Width = None,
    height: Height = None,
    k: TargetCount = None,
    schedule: Spec = None,
    max_run: MaxRun = None,
    time_budget: Annotated[
        Optional[float],
        Option(
            "--time-budget",
            help="Seconds that making it may take: as many target blocks as they allow, planned while it runs.",
        ),
    ] = None,
    seed: Annotated[Optional[int], Option("--seed", help="Decides all noise. Default 0.")] = None,
    steps: Annotated[
        Optional[list[str]], Option("--steps", help="ROLE=LIST, e.g. drafter=1000,750,500,250. May be repeated.")
    ] = None,
    terminal_step: Annotated[Optional[bool], Option("--terminal-step", help="Add Krea's last step, at t = 0.")] = None,
    anchor_first_latent: Annotated[
        Optional[bool], Option("--anchor-first-latent", help="Every block sees the first latent frame.")
    ] = None,
    keep_first_frames: Annotated[
        Optional[bool], Option("--keep-first-frames", help="Deliver the 3 frames that are dropped by default.")
    ] = None,
    drafter_context: Annotated[
        Optional[str], Option("--drafter-context", help="session, or rolling:WINDOW[:SINK] in latent frames.")
    ] = None,
    stitch: Annotated[
        Optional[int],
        Option("--stitch", help="The drafter does the first N steps of every target block except block 0."),
    ] = None,
    negative: Annotated[
        Optional[str], Option("--negative", help="What the video should not show, for pairs with guidance.")
    ] = None,
    guidance: Annotated[
        Optional[float],
        Option("--guidance", help="How hard the target is pushed away from --negative; 1 turns it off."),
    ] = None,
    precision: PrecisionName = None,
    attention: Annotated[
        Optional[str], Option("--attention", help="auto, or a name that `specar doctor` lists.")
    ] = None,
    compiled: Annotated[
        Optional[bool], Option("--compile/--no-compile", help="torch.compile instead of SpecAR's own kernels.")
    ] = None,
    models_dir: ModelsDir = None,
    target: Annotated[Optional[Path], Option("--target", help="Checkpoint of the target.")] = None,
    drafter: Annotated[Optional[Path], Option("--drafter", help="Checkpoint of the drafter.")] = None,
    text_encoder: Annotated[Optional[Path], Option("--text-encoder", help="Checkpoint of the text encoder.")] = None,
    vae: Annotated[Optional[Path], Option("--vae", help="Checkpoint of the VAE.")] = None,
    out: Annotated[Path, Option("--out", help="The video.")] = Path("specar.mp4"),
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing or unfinished video.")] = False,
    run_dir: Annotated[
        Optional[Path], Option("--run-dir", help="Where it is kept while unfinished. Default: FILE.run beside it.")
    ] = None,
    from_report: Annotated[
        Optional[Path], Option("--from", help="Settings of an earlier video, from its FILE.json or FILE.mp4.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    asked = {
        "prompt": example(example_name) if example_name else prompt,
        "timeline": read_text(timeline) if timeline else None,
        "seed": seed,
        "seconds": seconds,
        "blocks": blocks,
        "frames": frames,
        "width": width,
        "height": height,
        "k": None if k is None else whole(k, "k"),
        "schedule": schedule,
        "max_run": None if max_run is None else whole(max_run, "max-run"),
        "time_budget": time_budget,
        "steps": parse_steps(steps or []),
    }
    options = {
        "terminal_step": terminal_step,
        "anchor_first_latent": anchor_first_latent,
        "keep_first_frames": keep_first_frames,
        "drafter_context": drafter_context,
        "stitch": stitch,
        "negative": negative,
        "guidance": guidance,
    }
    if not out.name:
        raise UsageError(f"{out} is a folder; add a file name ending in .mp4.")
    from . import files
    from .inputs import asked_inputs, changed_inputs
    from .job import only_one
    from .making import machine_for, make_video, make_videos, resolved, show_plan
    from .plan import model_files
    from .report import changed_models

    only_one(prompt=prompt, example=example_name, prompt_file=prompt_file, timeline=timeline)
    prompts = prompts_in(prompt_file) if prompt_file else []
    if prompts:
        if run_dir:
            raise UsageError("each video of a prompt file has its own run folder: leave out --run-dir")
        asked["prompt"] = prompts[0]
    told = told_by(from_report, report_in(from_report)) if from_report else {}
    settings = merged(told, {**given(asked), "options": given(options)})
    folders = [Path(), files.models_dir(models_dir) / "loras", *([from_report.parent] if from_report else [])]
    inputs = asked_inputs(lora or [], image, video_file, strength, told.get("inputs", {}), folders)
    job, inputs_there = resolved(backbone(backbone_name or told.get("backbone", "krea")), settings, inputs)
    for changed in changed_inputs(told.get("inputs", {}), job.told_options):
        say(f"notice: {changed}: expect another video")
    machine = machine_for(told, precision, attention, compiled)
    named = given({"target": target, "drafter": drafter, "text encoder": text_encoder, "vae": vae})
    if ctx.info_name == "plan":
        show_plan(job, prompts, machine, models_dir, named, out, as_json, overwrite=overwrite, run_dir=run_dir)
        return
    paths = {**model_files(job, files.models_dir(models_dir), named), **inputs_there}
    for changed in changed_models(told.get("models", []), paths):
        say(f"notice: {changed}: expect another video")
    if prompts:
        make_videos(job, prompts, machine, paths, out, as_json, overwrite)
    else:
        make_video(job, machine, paths, out, as_json, overwrite=overwrite, run_dir=run_dir)


app.command("generate", help="Make a video.")(video)
app.command(
    "plan",
    help="Tell what `generate` with the same options would take; loads no weights, needs no GPU. Exits with 1 if it "
    "would be refused.",
)(video)


def given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def parse_steps(texts: list[str]) -> dict[str, list[int]]:
    steps = {}
    for text in texts:
        role, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"--steps is ROLE=LIST, e.g. drafter=1000,750,500,250, not '{text}'")
        steps[role] = [whole(value, f"a step of the {role}") for value in values.split(",")]
    return steps


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as text: {reason(error)}") from None


def prompts_in(path: Path) -> list[str]:
    from .timeline import prompt_lines

    if not (prompts := [line for _, line in prompt_lines(read_text(path))]):
        raise UsageError(f"{path} holds no prompt")
    return prompts


@app.command(help="Go on with an unfinished video.")
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="FILE.run beside the video.", show_default=False)],
    models_dir: ModelsDir = None,
    as_json: AsJson = False,
) -> None:
    from . import files
    from .checkpoint import read_run
    from .inputs import of_options
    from .making import machine_for, make_video, resolved
    from .plan import model_files

    run = read_run(run_dir)
    if "out" not in run:
        raise UsageError(f"{run_dir} is the run of a ComfyUI graph: queue the same graph again to go on with it")
    told = told_by(run_dir, run["report"])
    inputs = of_options(told["inputs"], run["files"], [])
    job, inputs_there = resolved(backbone(told["backbone"]), merged(told, {}), inputs)
    machine = machine_for(told)
    known = {what: Path(file) for what, file in run["files"].items() if what not in job.inputs}
    named = {what: path for what, path in known.items() if path.exists()}
    out = Path(os.path.normpath(run_dir / run["out"]))
    paths = {**model_files(job, files.models_dir(models_dir), named), **inputs_there}
    make_video(job, machine, paths, out, as_json, overwrite=run["overwrite"], run_dir=run_dir, resume=True)


@app.command(
    help="Run policies against each other, from the same prompt, seed and noise, and write one page that compares "
    "them. The same command again goes on with a race that was interrupted."
)
def race(
    backbone_name: BackboneName = "krea",
    prompts: Annotated[Optional[list[str]], Option("--prompt", help="What the videos show. May be repeated.")] = None,
    examples: Annotated[
        Optional[list[str]], Option("--example", help="A prompt of `specar examples`. May be repeated.")
    ] = None,
    policies: Annotated[Optional[list[str]], Option("--policy", help=f"Two or more, each by name: {SPECS}.")] = None,
    seconds: Seconds = None,
    blocks: BlockCount = None,
    width: Width = None,
    height: Height = None,
    seed: Annotated[int, Option("--seed", help="Decides all noise.")] = 0,
    precision: PrecisionName = None,
    attention: Annotated[str, Option("--attention", help="auto, or a name that `specar doctor` lists.")] = "auto",
    compiled: Annotated[
        bool, Option("--compile/--no-compile", help="torch.compile instead of SpecAR's own kernels.")
    ] = False,
    models_dir: ModelsDir = None,
    out: Annotated[Path, Option("--out", help="The page; videos and scores lie beside it.")] = Path("race.html"),
    embed: Annotated[bool, Option("--embed", help="The page holds the videos: one file to pass on.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an earlier race.")] = False,
    as_json: AsJson = False,
) -> None:
    from . import files
    from .bars import bar, run_listener
    from .inputs import Inputs
    from .machine import Machine
    from .making import able, resolved
    from .plan import model_files
    from .race.run import race as run_race

    shown = [*(prompts or []), *(example(name) for name in examples or [])]
    if not shown:
        raise UsageError("what should the videos show? Give --prompt TEXT, or --example NAME of `specar examples`")
    asked = given({"seed": seed, "seconds": seconds, "blocks": blocks, "width": width, "height": height})
    jobs = [
        resolved(backbone(backbone_name), {**asked, "prompt": text, "schedule": policy}, Inputs())[0]
        for text in shown
        for policy in policies or []
    ]
    machine = Machine.here(precision, attention, compiled)
    paths: dict[str, Path] = {}
    for job in jobs:
        paths |= model_files(job, files.models_dir(models_dir), {})
        machine = able(job, machine, out.parent, ("--blocks", "--width"))
    with bar(stderr) as progress:
        scores = run_race(
            jobs,
            machine,
            paths,
            out,
            embed=embed,
            overwrite=overwrite,
            listening=lambda job: run_listener(job, progress),
            progress=progress,
        )
    print(json.dumps(scores) if as_json else out)


@app.command(help="Measure finished videos: hand-overs, drift, run position, flicker, likeness to target-only.")
def score(
    videos: Annotated[list[Path], typer.Argument(metavar="VIDEO...", show_default=False)],
    plots: Annotated[Optional[Path], Option("--plots", help="Also draw them, into this HTML page.")] = None,
    with_vbench: Annotated[
        bool, Option("--vbench", help="Also VBench's six dimensions, in its own environment.")
    ] = False,
    with_reward: Annotated[bool, Option("--visionreward", help="Also VisionReward, in its own environment.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an earlier page.")] = False,
    as_json: AsJson = False,
) -> None:
    from . import charts
    from .bars import bar
    from .score import problems, read_video, table
    from .score import score as measured
    from .scorers import vbench, vision_reward
    from .writing import keep, write

    if plots and plots.suffix.lower() != ".html":
        raise UsageError(f"{plots} does not end in .html, as the page of plots does")
    if plots and not overwrite:
        keep(plots)
    for path in videos:
        read_video(path)  # before anything takes time
    outside = {}
    if with_vbench:
        outside["vbench"] = vbench.vbench(videos)
    if with_reward:
        outside["visionreward"] = vision_reward.vision_reward(videos)
    with bar(stderr) as progress:
        scores = {**measured(videos, progress), **outside}
    if plots:
        write(plots, charts.page(scores).encode("utf-8", "replace"))
    if as_json:
        print(json.dumps(scores))
    else:
        tables = {"vbench": vbench.table, "visionreward": vision_reward.table}
        print("\n\n".join([table(scores), *(tables[name](told) for name, told in outside.items())]))
    if found := problems(scores):
        raise SpecarError("\n".join(found))


@app.command(
    help="Run a study of the repository with its own options: `specar bench policies --help`.",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def bench(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help="policies, policy_times, ...", show_default=False)]
) -> None:
    from .bench import bench as run

    raise typer.Exit(run(name, ctx.args))


@app.command(help="Positions of the target blocks, and the draft runs between them.")
def schedule(
    blocks: Annotated[int, Option("--blocks", help="Length in blocks.")],
    k: TargetCount = None,
    schedule: Spec = None,
    max_run: MaxRun = None,
    as_json: AsJson = False,
) -> None:
    asked = given({"spread": k, "": schedule, "max-run": max_run})
    if len(asked) != 1:
        raise UsageError("give one of --k, --schedule and --max-run")
    check_blocks(blocks)
    ((name, value),) = asked.items()
    placed, notices = parse(f"{name}:{value}" if name else value, blocks)
    for notice in notices:
        say(f"notice: {notice}")
    if as_json:
        print(json.dumps(placed.to_dict()))
        return
    print(placed.strip)
    if isinstance(placed, Open):
        print(f"T: the target's; ?: settled while it runs. No draft run is longer than {placed.max_draft_run}")
        return
    print(f"target blocks: {', '.join(map(str, placed.targets)) or 'none'}")
    print(f"draft runs: {', '.join(map(str, placed.draft_runs)) or 'none'}; the longest is {placed.max_draft_run}")


@app.command(help="Fetch the model files of a pair.")
def download(
    backbone_name: Annotated[str, Option("--backbone", help="krea, helios or helios-mid.")],
    models_dir: ModelsDir = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List what would be fetched.")] = False,
) -> None:
    from . import files
    from .bars import bar
    from .download import download as fetch
    from .download import plan_download

    pair, models = backbone(backbone_name), files.models_dir(models_dir)
    if not pair.files:
        print(f"{pair.name} is part of SpecAR: nothing to download")
        return
    for planned in plan_download(pair.files, models):
        file, state = planned.file, "there" if planned.complete else "missing"
        if planned.present and not planned.complete:
            state = f"{planned.present / 1e9:.1f} GB there"
        print(f"{file.what}: {planned.path}, {state}")
        print(f"  {file.bytes / 1e9:.2f} GB, {file.path} of {file.repository}, licence: {file.licence}")
    if not dry_run:
        with bar(stderr) as progress:
            for path in fetch(pair.files, models, progress=progress):
                print(path)


@app.command(help="Tell what checkpoint files are, and whether they are whole and finite.")
def check(paths: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)]) -> None:
    from .bars import bar
    from .check import check_file

    with bar(stderr) as progress:
        reports = [check_file(path, partial(progress, f"checking {path.name}")) for path in paths]
    for report in reports:
        print(report)
    if faulty := [report for report in reports if report.problem]:
        raise SpecarError(f"{len(faulty)} of {len(reports)} files cannot be used")


@app.command(help="Tell what this machine can do.")
def doctor(models_dir: ModelsDir = None, as_json: AsJson = False) -> None:
    from .doctor import examine

    findings = examine(models_dir)
    print(json.dumps(findings.to_dict(), indent=1) if as_json else findings.text())


@app.command(help="The curated prompts.")
def examples(as_json: AsJson = False) -> None:
    if as_json:
        print(json.dumps(EXAMPLES, indent=1))
        return
    for name, prompt in EXAMPLES.items():
        print(f"{name}\n  {prompt}")


def main() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # closed by whoever began this
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a console of few characters must not end a run
        setattr(sys, name, stream)
    app(prog_name="specar")


if __name__ == "__main__":
    main()
