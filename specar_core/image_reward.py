"""ImageReward (arXiv:2304.05977) as a scorer, in a process and an environment of its own.

The package `image-reward` pins old releases of other packages, so it cannot be imported here. A Python that has it runs
image_reward_worker.py, which reads frames from a pipe and answers with scores.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from .errors import SpecarError

if TYPE_CHECKING:
    from .scorers import Scorer

VARIABLE = "SPECAR_IMAGE_REWARD"
INSTALL = (
    "python3 -m venv image-reward && image-reward/bin/pip install torch torchvision image-reward==1.5 "
    "'transformers<4.40' git+https://github.com/openai/CLIP.git && "
    f"export {VARIABLE}=$PWD/image-reward/bin/python"
)
WORKER = Path(__file__).with_name("image_reward_worker.py")


def unready(prompt: str) -> str | None:
    """Why it cannot judge here by this prompt."""
    if not prompt:
        return "drafts cannot be judged without the text of the prompt"
    if not os.environ.get(VARIABLE):
        return f"ImageReward judges the drafts, and needs an environment of its own. Once:\n{INSTALL}"
    return None


@contextlib.contextmanager
def image_reward(device: torch.device) -> Iterator["Scorer"]:
    """SpecarError if it does not start. Its weights, 1.8 GB, go to ~/.cache/ImageReward when it first does."""
    command = [os.environ[VARIABLE], str(WORKER), str(device)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise SpecarError(f"{VARIABLE}={command[0]} cannot be run ({error.strerror}): {INSTALL}") from None
    with process:  # waits for it; it ends with its pipe
        assert process.stdin and process.stdout
        try:
            yield ImageReward(process.stdin, process.stdout)
        finally:
            with contextlib.suppress(BrokenPipeError):  # it ended by itself
                process.stdin.close()


class ImageReward:
    def __init__(self, frames: IO[bytes], answers: IO[bytes]) -> None:
        self.frames, self.answers = frames, answers
        if self._answer() != "ready":
            raise SpecarError(f"ImageReward did not start; its own words are above. To install it: {INSTALL}")

    def score(self, prompt: str, frames: Tensor) -> Tensor:
        pixels = (frames.permute(1, 2, 3, 0) * 255).round().to(torch.uint8).cpu().contiguous()
        with contextlib.suppress(BrokenPipeError):
            self.frames.write(json.dumps({"prompt": prompt, "shape": list(pixels.shape)}).encode() + b"\n")
            self.frames.write(pixels.numpy().tobytes())
            self.frames.flush()
        scores = self._answer()
        if scores is None:
            raise SpecarError("ImageReward ended while it judged a draft; its own words are above")
        return torch.tensor(scores, dtype=torch.float32)

    def _answer(self) -> object:
        line = self.answers.readline()
        return json.loads(line) if line else None
