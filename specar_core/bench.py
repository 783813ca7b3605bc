"""The studies in the repository's folder benchmarks, by name. They are no part of an installed package."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError

ROOT = Path(__file__).parents[1]


def bench(name: str, arguments: Sequence[str]) -> int:
    """The exit code of a study with these arguments. UsageError where there is none of this name."""
    studies = sorted(path.stem for path in ROOT.glob("benchmarks/*.py") if "\ndef main(" in path.read_text("utf-8"))
    if not studies:
        raise UsageError("the studies are in SpecAR's repository only: there, `pip install --editable '.[cli,test]'`")
    if name not in studies:
        raise UsageError(f"unknown study '{name}'; known are {', '.join(studies)}")
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": found}).returncode
