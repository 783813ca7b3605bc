"""Runs in the environment of VBench, started by vbench.py: a folder of videos in, VBench's own file of results out."""

import sys

sys.path.pop(0)  # the folder of this file, whose modules have the names of others

import torch  # noqa: E402
from vbench import VBench  # noqa: E402

videos, results, *dimensions = sys.argv[1:]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
evaluation = VBench(device, None, results)
evaluation.evaluate(videos_path=videos, name="specar", dimension_list=dimensions, mode="custom_input")
