"""The `specar` command. Results go to standard output, everything else to standard error.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

import io
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from typer.core import TyperGroup

from . import __version__
from .backbones import NAMES, backbone
from .errors import SpecarError, UsageError
from .examples import EXAMPLES, example
from .policies import SPECS, parse

if TYPE_CHECKING:  # torch takes more than a second to import: only the commands that need it do
    from .backbones.base import Machine
    from .job import Job

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


class Said(logging.Handler):
    """The library's log on standard error, above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr.print(self.format(record), markup=False)


class Guarded(TyperGroup):
    """Turns errors into one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            fail(str(error), 2)
        except SpecarError as error:
            fail(str(error), 1)
        except KeyboardInterrupt:
            fail("interrupted", 130)


def fail(message: str, code: int) -> None:
    stderr.print(f"specar: {message}", markup=False)
    raise typer.Exit(code)


app = typer.Typer(
    name="specar",
    cls=Guarded,
    help="Long video by a drafter and a target that share one rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Option = typer.Option
BackboneName = Annotated[str, Option("--backbone", help=f"The pair: {', '.join(NAMES)}.")]
BlockCount = Annotated[Optional[int], Option("--blocks", help="Length in blocks.")]
TargetCount = Annotated[Optional[str], Option("--k", help="How many blocks the target generates, evenly spread.")]
Spec = Annotated[Optional[str], Option("--schedule", help=f"A schedule by name: {SPECS}.")]
MaxRun = Annotated[Optional[str], Option("--max-run", help="Longest draft run, with as few target blocks as it takes.")]
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill keeps the finished blocks, like Ctrl-C


def video(
    ctx: typer.Context,
    backbone_name: BackboneName = "",
    prompt: Annotated[Optional[str], Option("--prompt", help="What the video shows.")] = None,
    example_name: Annotated[Optional[str], Option("--example", help="A prompt of `specar examples`.")] = None,
    seconds: Annotated[Optional[float], Option("--seconds", help="Length in seconds, rounded up to blocks.")] = None,
    blocks: BlockCount = None,
    frames: Annotated[Optional[int], Option("--frames", help="Length in frames, rounded up to blocks.")] = None,
    width: Annotated[Optional[int], Option("--width", help="In pixels.")] = None,
    height: Annotated[Optional[int], Option("--height", help="In pixels.")] = None,
    k: TargetCount = None,
    schedule: Spec = None,
    max_run: MaxRun = None,
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
    negative: Annotated[
        Optional[str], Option("--negative", help="What the video should not show, for pairs with guidance.")
    ] = None,
    guidance: Annotated[
        Optional[float], Option("--guidance", help="How far the target is led away from it; 1 is not at all.")
    ] = None,
    precision: Annotated[Optional[str], Option("--precision", help="bf16 or fp32. Default: bf16 on a GPU.")] = None,
    attention: Annotated[
        Optional[str], Option("--attention", help="auto, or a name that `specar doctor` lists.")
    ] = None,
    compiled: Annotated[
        Optional[bool], Option("--compile/--no-compile", help="Compile the models' blocks: about a minute, once.")
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
    from_report: Annotated[Optional[Path], Option("--from", help="Settings of an earlier video's FILE.json.")] = None,
    as_json: AsJson = False,
) -> None:
    asked = {
        "prompt": example(example_name) if example_name else prompt,
        "seed": seed,
        "seconds": seconds,
        "blocks": blocks,
        "frames": frames,
        "width": width,
        "height": height,
        "k": whole(k, "k"),
        "schedule": schedule,
        "max_run": whole(max_run, "max-run"),
    }
    options = {
        "terminal_step": terminal_step,
        "anchor_first_latent": anchor_first_latent,
        "keep_first_frames": keep_first_frames,
        "drafter_context": drafter_context,
        "negative": negative,
        "guidance": guidance,
    }
    if prompt is not None and example_name:
        raise UsageError("give only one of prompt and example")
    told = told_by(from_report, read_report(from_report)) if from_report else {}
    job = resolved(
        backbone_name or told.get("backbone", "krea"), given(asked), parse_steps(steps or []), given(options), told
    )
    machine = this_machine(
        precision or told.get("precision"),
        attention or told.get("attention", "auto"),
        told.get("compile", False) if compiled is None else compiled,
    )
    named = given({"target": target, "drafter": drafter, "text encoder": text_encoder, "vae": vae})
    if ctx.info_name == "plan":
        show_plan(job, machine, models_dir, named, run_dir or out.with_suffix(".run"), as_json)
        return
    from .report import differences

    paths = found(job, models_dir, named)
    for difference in differences(told.get("models", []), paths):
        stderr.print(f"notice: {difference}: expect another video", markup=False)
    make_video(job, machine, paths, out, as_json, overwrite=overwrite, run_dir=run_dir)


app.command("generate", help="Make a video.")(video)
app.command("plan", help="Tell what `generate` with the same options would take; loads no weights, needs no GPU.")(
    video
)


def given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def whole(text: str | None, name: str) -> int | None:
    """A whole number; anything else is refused by name rather than rounded."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not '{text}'") from None
    if value < 0:
        raise UsageError(f"{name} must be at least 0, not {value}")
    return value


def parse_steps(texts: list[str]) -> dict[str, list[int]]:
    steps = {}
    for text in texts:
        role, _, values = text.partition("=")
        numbers = [whole(value, f"a step of the {role}") for value in values.split(",")]
        steps[role] = [number for number in numbers if number is not None]
    return steps


# Options of which one replaces another: what the user asks for now replaces the whole group of an earlier report.
EXCLUSIVE = (("seconds", "blocks", "frames"), ("k", "schedule", "max_run"))


def resolved(
    name: str, asked: dict[str, Any], steps: dict[str, Any], options: dict[str, Any], told: dict[str, Any]
) -> "Job":
    from .job import resolve

    settings = dict(told.get("settings", {}))
    for group in EXCLUSIVE:
        if any(option in asked for option in group):
            for option in group:
                settings.pop(option, None)
    settings.update(asked)
    if "prompt" not in settings:
        raise UsageError("what should the video show? Give --prompt TEXT, or --example NAME of `specar examples`")
    job, notices = resolve(
        backbone(name),
        **settings,
        steps={**told.get("steps", {}), **steps},
        options={**told.get("options", {}), **options},
    )
    for notice in notices:
        stderr.print(f"notice: {notice}", markup=False)
    return job


def read_report(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path} is not the report of a SpecAR video") from None


def told_by(path: Path, report: Any) -> dict[str, Any]:
    """The settings that a video was made with, from its report, which lies in `path`."""
    try:
        schedule = report["schedule"]
        parsed, _ = parse(schedule["policy"], schedule["blocks"])
        same = list(parsed.targets) == schedule["targets"]
        return {
            "backbone": report["backbone"],
            "settings": {
                **({"prompt": report["prompts"][0]["text"]} if report["prompts"] else {}),
                "seed": report["seed"],
                "width": report["width"],
                "height": report["height"],
                "blocks": schedule["blocks"],
                "schedule": schedule["policy"] if same else "list:" + ",".join(map(str, schedule["targets"])),
            },
            "steps": {role: sampling["steps"] for role, sampling in report["sampling"].items()},
            "options": report["options"],
            "precision": report["environment"]["precision"],
            "attention": report["environment"]["attention"],
            "compile": report["environment"]["compile"],
            "models": report["models"],
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UsageError(f"{path} is not the report of a SpecAR video") from None


def this_machine(precision: str | None, attention: str, compiled: bool) -> "Machine":
    import torch

    from .backbones.base import Machine
    from .models.attention import check_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = precision or ("bf16" if device.type == "cuda" else "fp32")
    if precision not in ("bf16", "fp32"):
        raise UsageError(f"unknown precision '{precision}'; known are bf16 and fp32")
    check_name(attention)
    return Machine(device, precision, attention, compiled)  # type: ignore[arg-type]


def show_plan(
    job: "Job", machine: "Machine", models_dir: Path | None, named: dict[str, Path], folder: Path, as_json: bool
) -> None:
    from . import files
    from .plan import damaged_files, plan, refusal

    models = files.models_dir(models_dir)
    there, missing = files.find(needed(job), models, named)
    absent = [str(models / file.folder / file.name) for file in missing]
    planned = plan(job, machine, absent, damaged_files(there))
    refused = refusal(planned, machine, folder)
    if as_json:
        print(json.dumps({**planned.to_dict(), "refusal": refused}, indent=1))
    else:
        print(planned.text())
        if refused:
            print(f"refused   {refused}")


def found(job: "Job", models_dir: Path | None, named: dict[str, Path]) -> dict[str, Path]:
    """The file of each model, none of them missing or damaged."""
    from . import files
    from .plan import damaged_files

    required = files.require(needed(job), files.models_dir(models_dir), job.backbone.name, named)
    if faults := damaged_files(required):
        raise SpecarError("\n".join(faults))
    return {**job.backbone.shipped, **required}


def make_video(
    job: "Job", machine: "Machine", paths: dict[str, Path], out: Path, as_json: bool, **placing: Any
) -> None:
    """placing: what `generate` needs to know of the files that are there already."""
    from .generate import generate
    from .models.compiled import no_compiler
    from .plan import plan, refusal
    from .progress import shown

    if machine.compile and (reason := no_compiler(machine.device)):
        stderr.print(f"notice: runs without --compile: {reason}", markup=False)
        machine = replace(machine, compile=False)
    if refused := refusal(plan(job, machine), machine, placing["run_dir"] or out.with_suffix(".run")):
        raise SpecarError(refused)
    with shown(job, stderr) as listener:
        report = generate(job, machine, paths, out, listener=listener, **placing)
    print(json.dumps(report, indent=1, ensure_ascii=False) if as_json else out)


@app.command(help="Go on with an unfinished video.")
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="FILE.run beside the video.", show_default=False)],
    models_dir: ModelsDir = None,
    as_json: AsJson = False,
) -> None:
    from .checkpoint import read_run

    run = read_run(run_dir)
    if "out" not in run:
        raise UsageError(f"{run_dir} is the run of a ComfyUI graph: queue the same graph again to go on with it")
    told = told_by(run_dir, run["report"])
    job = resolved(told["backbone"], {}, {}, {}, told)
    machine = this_machine(told["precision"], told["attention"], told["compile"])
    named = {what: Path(file) for what, file in run["files"].items() if os.path.exists(file)}
    out = Path(os.path.normpath(run_dir / run["out"]))
    paths = found(job, models_dir, named)
    make_video(job, machine, paths, out, as_json, overwrite=run["overwrite"], run_dir=run_dir, resume=True)


def needed(job: "Job") -> list[Any]:
    """The files to find: a model that no block asks for is not among them."""
    return [file for file in job.backbone.files if file.what not in ("target", "drafter") or file.what in job.roles]


@app.command(help="Positions of the target blocks, and the draft runs between them.")
def schedule(
    blocks: Annotated[int, Option("--blocks", help="Length in blocks.")],
    k: TargetCount = None,
    schedule: Spec = None,
    max_run: MaxRun = None,
    as_json: AsJson = False,
) -> None:
    asked = given({"spread": whole(k, "k"), "": schedule, "max-run": whole(max_run, "max-run")})
    if len(asked) != 1:
        raise UsageError("give one of --k, --schedule and --max-run")
    ((name, value),) = asked.items()
    placed, notices = parse(f"{name}:{value}" if name else value, blocks)
    for notice in notices:
        stderr.print(f"notice: {notice}", markup=False)
    if as_json:
        print(json.dumps(placed.to_dict()))
        return
    print("".join("T" if placed.role(block) == "target" else "d" for block in range(blocks)))
    print(f"target blocks: {', '.join(map(str, placed.targets)) or 'none'}")
    print(f"draft runs: {', '.join(map(str, placed.draft_runs)) or 'none'}; the longest is {placed.max_draft_run}")


@app.command(help="Fetch the model files of a pair.")
def download(
    backbone_name: Annotated[str, Option("--backbone", help="krea, helios or helios-mid.")],
    models_dir: ModelsDir = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List what would be fetched.")] = False,
) -> None:
    from . import files
    from .download import download as fetch
    from .download import plan_download
    from .progress import downloading

    pair, models = backbone(backbone_name), files.models_dir(models_dir)
    if not pair.files:
        print(f"{pair.name} is part of SpecAR: nothing to download")
        return
    for planned in plan_download(pair.files, models):
        file, state = planned.file, "there" if planned.complete else "missing"
        if planned.present and not planned.complete:
            state = f"{planned.present / 1e9:.1f} GB there"
        print(f"{file.what}: {planned.path}, {state}")
        print(f"  {file.size / 1e9:.2f} GB, {file.path} of {file.repository}, licence: {file.licence}")
    if not dry_run:
        with downloading(stderr) as progress:
            for path in fetch(pair.files, models, progress=progress):
                print(path)


@app.command(help="Tell what checkpoint files are, and whether they are whole and finite.")
def check(paths: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)]) -> None:
    from .weights import check_file

    reports = [check_file(path) for path in paths]
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
    for stream in (sys.stdout, sys.stderr):  # a console of few characters must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="specar")


if __name__ == "__main__":
    main()
