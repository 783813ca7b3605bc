"""The folder of an unfinished run: everything that it takes to go on after the process or the machine is gone.

`run.json` tells what is being made; `block-INDEX-CHECKSUM.safetensors` holds a committed block; finished segments of
the video lie beside them (video.py). Files get their names when they are whole and on the disk, and a block's name
holds a part of its SHA-256, so damage of any kind looks like a block that is not there. Blocks are small (1.6 MB at
832x480) because nothing of the decoder is kept: its histories are rebuilt from the newest latents.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save
from torch import Tensor

from .backbones.pair import Committed
from .errors import SpecarError, UsageError, reason
from .foreign import SETTINGS, fits, load, read
from .rollout import BlockResult
from .tensor_files import open_checkpoint
from .writing import write

FORMAT = 1
LARGEST = 1 << 28  # bytes of a block: one of 4096x4096 has 84 million
RUN = {"format": int, "report": SETTINGS}
VIDEO_RUN = {**RUN, "out": str, "overwrite": bool, "files": {str: str}}  # a node's graph tells these
BLOCK = {"index": int, "role": str, "seconds": float, "forwards": int, "rejected": int}
LOCK, TOLD, BLOCKS, SEGMENTS = "lock", "run.json", "block-*.safetensors", "segment-*.mp4"


class RunFolder:
    """A run's folder, locked until it is closed: use it as a context manager.

    `blocks` is how many whole blocks, from the first one on, an earlier run left. With `resume=False` they are not
    taken over, and `begin` removes them.

    Raises UsageError for a folder of other things, SpecarError for one that another process works in or that cannot be
    written.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.folder = folder.absolute()
        self._files: list[Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_folder(self.folder)
            self._lock = open(self.folder / LOCK, "ab")
            if not lock(self._lock):
                raise SpecarError(f"{self.folder} is in use by another process: wait for it, or choose another folder.")
            for path in sorted(self.folder.glob(BLOCKS)) if resume else ():
                if _is_block(path, len(self._files)):
                    self._files.append(path)
        except OSError as error:
            raise SpecarError(f"Cannot write {self.folder}: {reason(error)}. Choose another folder.") from error
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="specar-checkpoint")
        self._pending: Future[None] | None = None

    @property
    def blocks(self) -> int:
        return len(self._files)

    def latents(self, block: int) -> Tensor | None:
        """What an earlier run committed as this block, [B, C, T, h, w] on the CPU; None behind the last one."""
        return self._tensor(block, "latents") if block < self.blocks else None

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether these blocks' latents are of this shape; reads headers only."""
        return all(open_checkpoint(path).names["latents"].shape == shape for path in self._files)

    def told(self) -> list[dict[str, Any]]:
        """What the report says of each of these blocks."""
        return [json.loads(open_checkpoint(path).metadata["block"]) for path in self._files]

    def committed(
        self, blocks: int, prompt: Callable[[int], Tensor], cuts: Sequence[int] = (), start: Committed | None = None
    ) -> Committed | None:
        """What a rollout goes on from that has the first of these blocks; `start`, where it begins, if it has none."""
        if not blocks:
            return start
        names = open_checkpoint(self._files[blocks - 1]).names.keys() - {"latents"}
        extra = {name: self._tensor(blocks - 1, name) for name in names}

        def latents(block: int) -> Tensor:
            return start.latents(block) if start and block < 0 else self._tensor(block, "latents")

        first = max((cut for cut in cuts if cut < blocks), default=start.first if start else 0)
        return Committed(blocks, latents, prompt, extra, first)

    def begin(self, told: Mapping[str, Any]) -> None:
        """Tells what is made here (as `read_run` returns it), and removes blocks that are no part of it."""
        for path in set(self.folder.glob(BLOCKS + "*")) - set(self._files):
            path.unlink()
        write(self.folder / TOLD, json.dumps({"format": FORMAT, **told}, indent=1).encode())

    def add(self, result: BlockResult, told: Mapping[str, Any]) -> None:
        """Writes a committed block while the next one is generated; told: what the report says of it.

        Raises SpecarError when this or the block before it could not be written.
        """
        tensors = {"latents": result.latents, **result.context.extra()}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self._wait()
        self._pending = self._worker.submit(self._add, result.index, tensors, json.dumps(told))

    def remove(self) -> None:
        """Closes and removes the folder: the video is whole, and what cannot be removed does no harm."""
        self.close()
        with contextlib.suppress(OSError):
            for pattern in (BLOCKS + "*", SEGMENTS + "*", TOLD + "*", LOCK):  # with what was being written
                for path in list(self.folder.glob(pattern)):
                    path.unlink()
            self.folder.rmdir()  # fails while others keep files in it

    def close(self) -> None:
        self._worker.shutdown()
        self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        if not used(self.folder):
            self.remove()

    def _add(self, index: int, tensors: Mapping[str, Tensor], told: str) -> None:
        data = save(dict(tensors), {"block": told})
        write(self.folder / block_name(index, data), data)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _tensor(self, block: int, name: str) -> Tensor:
        return open_checkpoint(self._files[block]).tensor(name).clone()  # not mapped: the file may be removed


def used(folder: Path) -> bool:
    """Whether anything would be lost with the folder of a run."""
    return any(folder.glob(BLOCKS)) or any(folder.glob(SEGMENTS))


def check_folder(folder: Path) -> None:
    """UsageError for a folder of other things."""
    if folder.is_dir() and (there := os.listdir(folder)) and LOCK not in there:
        raise UsageError(f"{folder} holds other files: choose another folder for the run")


def read_run(folder: Path) -> dict[str, Any]:
    """What `begin` told. Raises UsageError if there is no run here that this version can continue."""
    path = folder / TOLD
    try:
        told = read(path)
    except OSError as error:
        todo = "name the FILE.run beside the video, or make the video again with `specar generate`"
        why = f"not the folder of an unfinished run ({TOLD}: {error.strerror})"
        raise UsageError(f"{folder} is {why}: {todo}") from None
    except ValueError:
        told = None
    if not fits(told, VIDEO_RUN if isinstance(told, dict) and "out" in told else RUN) or told["format"] != FORMAT:
        raise UsageError(f"{path} is damaged, or another version of SpecAR wrote it: start again with --overwrite")
    return told


def block_name(index: int, data: bytes) -> str:
    """Blocks of another format have no valid name."""
    checksum = hashlib.sha256(b"%d" % FORMAT + data).hexdigest()
    return f"block-{index:06d}-{checksum[:16]}.safetensors"


def _is_block(path: Path, index: int) -> bool:
    """Whether it is whole, and what `add` writes."""
    if path.stat().st_size > LARGEST or path.name != block_name(index, path.read_bytes()):
        return False
    try:
        block = open_checkpoint(path)
        return "latents" in block.names and fits(load(block.metadata.get("block", "")), BLOCK)
    except (SpecarError, ValueError):
        return False


def lock(file: IO[bytes]) -> bool:
    """Held while the file is open, so it dies with the process. False if another one holds it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
