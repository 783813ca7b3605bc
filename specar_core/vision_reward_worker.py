"""Runs in the folder of VisionReward with its Python, started by vision_reward.py: its own `score` of videos.

A request is a line of JSON, {"key", "video", "prompt"}; so is an answer, {"key", "score"}.
"""

import json
import runpy
import sys

sys.path[0] = ""  # instead of the folder of this file, whose modules have the names of others
score = runpy.run_path("inference-video.py")["score"]  # loads the model
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"key": request["key"], "score": score(request["video"], request["prompt"])}), flush=True)
