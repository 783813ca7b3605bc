"""Runs in the environment of a scorer, started by outside.py with the name of a function here and its arguments.

The function returns one that answers questions. What the packages print goes to standard error.
"""

import json
import os
import runpy
import sys
from pathlib import Path


def image_reward(device):
    import ImageReward
    from PIL import Image

    model = ImageReward.load("ImageReward-v1.0", device=device)

    def score(prompt, shape):
        """The pixels of the frames [N, H, W, 3] follow the question."""
        count, height, width, channels = shape
        size = height * width * channels
        frames = [Image.frombytes("RGB", (width, height), questions.read(size)) for _ in range(count)]
        return [model.score(prompt, frame) for frame in frames]

    return score


def vbench():
    import torch
    from vbench import VBench

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def score(videos, results, dimensions):
        evaluation = VBench(device, None, results)
        evaluation.evaluate(videos_path=videos, name="specar", dimension_list=dimensions, mode="custom_input")
        return json.loads(Path(results, "specar_eval_results.json").read_text("utf-8"))

    return score


def vision_reward():
    os.chdir(Path(sys.executable).parent.parent.parent)  # of VisionReward/venv/bin/python
    sys.path.insert(0, "")
    score = runpy.run_path("inference-video.py")["score"]  # loads the model
    return lambda video, prompt: score(video, prompt)


def say(answer):
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules have the names of others
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    functions: dict = {"ImageReward": image_reward, "VBench": vbench, "VisionReward": vision_reward}
    score = functions[sys.argv[1]](*sys.argv[2:])
    say("ready")
    for line in questions:
        say(score(**json.loads(line)))
