"""Is this checkpoint whole, finite, and which model is it?"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .errors import SpecarError, UsageError
from .identity import Identity, identify
from .tensor_files import Checkpoint, open_checkpoint, some

_SLICE = 1 << 22  # values looked at together


@dataclass(frozen=True)
class FileReport:
    """What `specar check` says of one file. `problem` is None for a whole, finite checkpoint of a usable model."""

    path: Path
    bytes: int
    identity: Identity | None = None
    tensors: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # tensors of each type
    problem: str | None = None

    def __str__(self) -> str:
        lines = [self.problem or f"{self.path} is whole and finite."]
        if self.identity:
            types = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
            lines.append(f"  {self.identity}; {self.tensors} tensors ({types}); {self.bytes:,} bytes")
        return "\n".join(lines)


def check_file(path: str | Path, progress: Callable[[int, int], None] | None = None) -> FileReport:
    """Read a whole checkpoint; say what it is and what is wrong with it. Damage is reported, never raised."""
    path = Path(path)
    try:
        checkpoint = open_checkpoint(path, whole=False)
        identity = identify(checkpoint)
    except (SpecarError, UsageError) as error:
        return FileReport(path, os.path.getsize(path) if os.path.isfile(path) else 0, problem=str(error))
    types = Counter(str(info.dtype).removeprefix("torch.") for info in checkpoint.names.values())
    problem = None
    if checkpoint.bytes < checkpoint.declared:
        problem = f"{path} is cut off: {checkpoint.present}. Download it again."
    elif non_finite := list(_non_finite(checkpoint, progress)):
        problem = f"{path} holds NaN or infinity in {len(non_finite)} tensors: {some(non_finite)}. Download it again."
    elif not identity.usable:
        problem = f"{path} is whole and finite, but not usable here."
    return FileReport(path, checkpoint.bytes, identity, len(checkpoint.names), dict(types), problem)


def _non_finite(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None) -> Iterator[str]:
    done = 0
    for name, info in checkpoint.names.items():
        if info.dtype.is_floating_point and info.bytes:
            parts = checkpoint.tensor(name).reshape(-1).split(_SLICE)
            # NaN and infinity both show in the extremes, which need no mask of the tensor's size.
            if not all(torch.stack(part.float().aminmax()).isfinite().all() for part in parts):
                yield name
        done += info.bytes
        if progress:
            progress(done, checkpoint.bytes)
