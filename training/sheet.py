"""A contact sheet: some frames of each clip, a row for each schedule."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

COLUMNS = 12
LINE = 12  # pixels that a line of text takes


def save_sheet(path: Path, prompts: Sequence[str], clips: Mapping[str, Tensor]) -> None:
    """clips: by schedule, [B, 3, T, H, W] in [-1, 1], a clip for each prompt."""
    batch, _, frames, height, width = next(iter(clips.values())).shape
    times = torch.linspace(0, frames - 1, COLUMNS).long()
    group = LINE + len(clips) * (height + 1) + 4
    sheet = Image.new("RGB", (COLUMNS * (width + 1), batch * group), "white")
    draw = ImageDraw.Draw(sheet)
    for row, prompt in enumerate(prompts):
        top = row * group
        draw.text((1, top), f"{prompt}   ({', '.join(clips)})", fill="black")
        for line, clip in enumerate(clips.values()):
            for column, time in enumerate(times):
                pixels = ((clip[row, :, time].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0)
                place = (column * (width + 1), top + LINE + line * (height + 1))
                sheet.paste(Image.fromarray(pixels.numpy()), place)
    sheet.save(path, optimize=True)
