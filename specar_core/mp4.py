"""What an mp4 file says of itself, found without a demuxer: whether it is whole, and the texts that it carries."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import SpecarError, reason

LARGEST_TEXT = 1 << 26  # bytes; the report of a video of a day has a quarter of it
Span = tuple[int, int]  # the content of a box: its first offset in the file, and the offset after it


def read_metadata(path: str | Path) -> dict[str, str]:
    """The texts that an mp4 file carries, by key. Raises SpecarError for anything but a whole mp4 file.

    The file may be hostile: no demuxer sees it, and nothing is read but the boxes with the texts, moov/udta/meta with
    the names in `keys` and the values in `ilst` (Apple, QuickTime File Format, "Metadata").
    """
    texts = {}
    try:
        with open(path, "rb") as file:
            meta = _find(file, b"meta", _find(file, b"udta", _find_index(file)), header=4)
            keys = _find(file, b"keys", meta, header=8)  # whose entries are laid out as boxes are
            names = [_text(file, name) for _, name in _boxes(file, keys)]
            for number, item in _boxes(file, _find(file, b"ilst", meta)):
                value = _find(file, b"data", item, header=8)
                if value and 0 < int.from_bytes(number, "big") <= len(names):
                    texts[names[int.from_bytes(number, "big") - 1]] = _text(file, value)
    except (OSError, ValueError) as error:
        raise SpecarError(f"Cannot read {path} as an mp4 video: {reason(error)}") from error
    return texts


def is_whole(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(_find_index(file))
    except (OSError, ValueError):
        return False


def _find_index(file: BinaryIO) -> Span:
    index = _find(file, b"moov", (0, file.seek(0, os.SEEK_END)))
    if index is None:
        raise ValueError("it has no index")
    return index


def _find(file: BinaryIO, name: bytes, within: Span | None, header: int = 0) -> Span | None:
    """What follows the header of the first box `name`; looks at the others too, to notice what is cut off."""
    found = [(start + header, end) for box, (start, end) in _boxes(file, within) if box == name]
    return found[0] if found else None


def _boxes(file: BinaryIO, within: Span | None) -> Iterator[tuple[bytes, Span]]:
    """The boxes that fill a part of an mp4 file (ISO/IEC 14496-12, section 4.2), or ValueError."""
    position, end = within or (0, 0)
    while position < end:
        file.seek(position)
        size, name = struct.unpack(">I4s", file.read(8).ljust(8))
        start = position + 8
        if size == 1:  # too large for 32 bits
            (size,) = struct.unpack(">Q", file.read(8).ljust(8))
            start += 8
        elif size == 0:  # up to the end
            size = end - position
        if not start <= position + size <= end:
            raise ValueError("it is cut off or damaged")
        position += size
        yield name, (start, position)


def _text(file: BinaryIO, span: Span) -> str:
    if span[1] - span[0] > LARGEST_TEXT:
        raise ValueError("it is damaged: a text in it is too large")
    file.seek(span[0])
    return file.read(max(0, span[1] - span[0])).decode("utf-8", "replace")
