"""Runs in the environment of ImageReward, started by image_reward.py: frames in, scores out.

A request is a line of JSON, {"prompt", "shape": [N, H, W, 3]}, and that many bytes; the answer is a line of JSON.
"""

import json
import sys

import ImageReward
from PIL import Image

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
