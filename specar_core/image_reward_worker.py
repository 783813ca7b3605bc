"""Runs in the environment of ImageReward, started by image_reward.py: frames in, scores out.

A request is a line of JSON, {"prompt", "shape": [N, H, W, 3]}, and that many bytes; the answer is a line of JSON.
"""

import json
import sys

sys.path.pop(0)  # the folder of this file, whose modules have the names of others

import ImageReward  # noqa: E402
from PIL import Image  # noqa: E402

requests, answers = sys.stdin.buffer, sys.stdout
sys.stdout = sys.stderr  # the package prints
model = ImageReward.load("ImageReward-v1.0", device=sys.argv[1])
print(json.dumps("ready"), file=answers, flush=True)
for line in requests:
    request = json.loads(line)
    count, height, width, channels = request["shape"]
    size = height * width * channels
    frames = [Image.frombytes("RGB", (width, height), requests.read(size)) for _ in range(count)]
    print(json.dumps([model.score(request["prompt"], frame) for frame in frames]), file=answers, flush=True)
