"""Files that are written whole or not at all, and that replace nothing unasked."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .errors import SpecarError, UsageError, reason


def again(overwrite: bool, files: Iterable[Path]) -> str:
    """How several videos go on after an interruption, asked before they are begun: those that are still to replace old
    `files` would be refused without --overwrite, and with it nothing is kept."""
    if overwrite and any(file.exists() for file in files):
        return "the same command again, which begins anew"
    return "the same command again, without --overwrite"


def keep(*paths: Path) -> None:
    """UsageError if one of these files is there already."""
    for path in paths:
        if path.exists():
            no_folder(path)
            raise UsageError(f"{path} exists; choose another name, or overwrite it with --overwrite.")


def no_folder(path: Path) -> None:
    """UsageError if this file is a folder."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: choose another name.")


def writable(*paths: Path) -> None:
    """Makes the folders of these files; SpecarError if one of them cannot be written, UsageError if it is a folder."""
    for path in paths:
        no_folder(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _part(path).touch()
            _part(path).unlink()
        except (OSError, ValueError) as error:  # the latter for a character that no file name has
            raise SpecarError(f"Cannot write {path}: {reason(error)}. Choose another folder.") from error


@contextlib.contextmanager
def replacing(target: Path, size: int) -> Iterator[Path]:
    """A name beside `target` for about `size` bytes, renamed to it when they are safe on the disk."""
    import av

    part = _part(target)
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except (OSError, av.FFmpegError) as error:  # the latter where a video is written
        todo = "Make room or choose another folder."
        raise SpecarError(f"Cannot write {target} ({size:,} bytes): {reason(error)}. {todo}") from error
    finally:
        part.unlink(missing_ok=True)


def write(target: Path, data: bytes) -> None:
    """All of a file or, with a SpecarError, nothing of it."""
    with replacing(target, len(data)) as part:
        part.write_bytes(data)


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")
