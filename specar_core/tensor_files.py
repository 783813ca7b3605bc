"""Opens checkpoint files without trusting them: names, shapes and types from the header, weights mapped on demand.

Layouts: `.safetensors`, sharded `*.safetensors.index.json` (or a folder holding one, or a repository of diffusers with
that folder as its `transformer`), and zip-based torch files (`.pt`, `.pth`). A safetensors header is read here rather
than by the library, so that a damaged or hostile file is described in bytes and never makes us allocate what it
declares. Format: github.com/huggingface/safetensors.
"""

import json
import math
import mmap
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .errors import SpecarError, UsageError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 1 << 24  # bytes; the largest model read here needs 0.2 MB


@dataclass(frozen=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `bytes` is what the file (or all shards together) holds, `declared` what it should hold."""

    path: Path
    bytes: int
    declared: int
    names: dict[str, TensorInfo]
    metadata: dict[str, str]
    _read: Callable[[str], Tensor] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """A CPU tensor mapped from the file: its pages are read on first use and cost no anonymous memory."""
        return self._read(name)

    @property
    def present(self) -> str:
        share = math.floor(1000 * self.bytes / self.declared) / 10
        return f"{self.bytes:,} bytes present of {self.declared:,} declared ({share} %)"


def open_checkpoint(path: str | Path, *, whole: bool = True) -> Checkpoint:
    """Open a checkpoint in any layout, reading headers only.

    Raises UsageError when nothing readable is at `path`, SpecarError when what is there is not a whole checkpoint.
    With `whole=False` a safetensors file whose header is intact but whose data ends early is returned too.
    """
    path = Path(path)
    try:
        checkpoint = _open(path)
    except OSError as error:
        dangling = os.path.islink(path) and not os.path.exists(path)
        reason = "it is a link to a missing file" if dangling else error.strerror or str(error)
        raise UsageError(f"Cannot read {path}: {reason}. Check the path and its permissions.") from error
    if whole and checkpoint.bytes < checkpoint.declared:
        raise SpecarError(f"{path} is cut off: {checkpoint.present}. Download it again.")
    return checkpoint


def parts(path: str | Path) -> list[Path]:
    """The files that hold a checkpoint's tensors: the shards that its index names, else `path` itself."""
    path = Path(path)
    index = _index_in(path) if path.is_dir() else path
    if not index.name.endswith(".index.json"):
        return [index]
    return sorted({index.parent / shard for shard in _shard_of(index).values()})


def in_memory(tensors: Mapping[str, Tensor], label: str) -> Checkpoint:
    """Tensors that are loaded already, as a checkpoint; `label` stands for its path in messages."""
    names = {name: TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}
    size = sum(info.bytes for info in names.values())
    return Checkpoint(Path(label), size, size, names, {}, tensors.__getitem__)


def some(names: Iterable[str]) -> str:
    """The first three names, printable whatever they hold."""
    names = sorted(names)
    return ", ".join(_printable(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _printable(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:77] + "...")[1:-1]


def _damaged(path: Path, reason: str) -> SpecarError:
    return SpecarError(f"{path} is damaged or not a checkpoint: {reason}. Download it again.")


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_sharded(_index_in(path))
    with open(path, "rb") as file:
        head = file.read(512)
    if path.name.endswith(".index.json"):
        return _open_sharded(path)
    if reason := _foreign(head, path.stat().st_size):
        raise SpecarError(f"{path} is {reason}.")
    # By content first, because files get renamed. Byte 8 of a safetensors file opens its JSON header.
    if head[8:9] != b"{" and (head.startswith((b"PK\x03\x04", b"\x80")) or path.suffix in (".pt", ".pth")):
        return _open_torch(path, head)
    return _open_safetensors(path)


def _foreign(head: bytes, size: int) -> str | None:
    """What a file is that is no checkpoint, from its first bytes; None when it may be one."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if size == 0:
        return "empty (0 bytes). Download it again"
    if head.startswith(b"version https://git-lfs"):
        real = re.search(rb"\nsize (\d{1,15})\b", head)
        of = f" to {int(real[1]):,} bytes" if real else ""
        return f"a git-lfs pointer{of}, not the weights. Fetch them with `git lfs pull` or `specar download`"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, not a checkpoint (a login or error page was saved). Download it again"
    if head.startswith(b"GGUF"):
        return "a GGUF file, which is not supported. Use the .safetensors or .pt of this model"
    return None


# ------------------------------------------------------------------------------------------- safetensors


def _open_safetensors(path: Path) -> Checkpoint:
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        start = 8 + (int.from_bytes(prefix, "little") if len(prefix) == 8 else 0)
        if start > _LARGEST_HEADER:
            raise SpecarError(f"{path} is not a safetensors file ({size:,} bytes of something else).")
        if size < start:
            raise SpecarError(f"{path} is cut off: {size:,} bytes present of at least {start:,}. Download it again.")
        header = _json_object(file.read(start - 8), path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata is not a table of strings")
    if not header:
        raise _damaged(path, "it holds no tensors")
    spans = {name: _span(path, name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, begin, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if begin != end:
            raise _damaged(path, f"the data of {_printable(name)} does not follow the tensor before it")
        end = stop
    if size > start + end:
        raise _damaged(path, f"{size - start - end:,} bytes follow its last tensor")

    def read(name: str) -> Tensor:
        info, begin, _ = spans[name]
        return _mapped(path, start + begin, info)

    return Checkpoint(path, size, start + end, {name: span[0] for name, span in spans.items()}, metadata, read)


def _json_object(text: bytes, path: Path) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(value, dict):
        raise _damaged(path, "its header is not a JSON object")
    return value


def _span(path: Path, name: str, entry: object) -> tuple[TensorInfo, int, int]:
    """One header entry as (info, begin, end), offsets counted from the end of the header. Nothing in it is believed."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise _damaged(path, f"the entry of {_printable(name)} is malformed")
    if dtype not in _DTYPES:
        raise SpecarError(f"{path}: tensor {_printable(name)} has the unsupported type {_printable(dtype)}.")
    # Eight dimensions of 40 bits: enough for any model, and their product stays cheap.
    if len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise _damaged(path, f"{_printable(name)} has an impossible shape")
    info = TensorInfo(_DTYPES[dtype], tuple(shape), math.prod(shape) * _DTYPES[dtype].itemsize)
    if not 0 <= begin <= end or end - begin != info.bytes:
        raise _damaged(path, f"shape and offsets of {_printable(name)} do not agree")
    return info, begin, end


def _mapped(path: Path, offset: int, info: TensorInfo) -> Tensor:
    """Map one tensor. One mapping each: Linux refuses a private mapping larger than memory and swap together."""
    if not info.bytes:
        return torch.empty(info.shape, dtype=info.dtype)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        with open(path, "rb") as file:
            # Copy on write: torch wants a writable buffer, and nothing that happens to it reaches the file.
            pages = mmap.mmap(file.fileno(), offset + info.bytes - start, access=mmap.ACCESS_COPY, offset=start)
    except OSError as error:
        raise SpecarError(f"Cannot map {path} into memory: {error}. On Windows the page file may be small.") from error
    flat = torch.frombuffer(pages, dtype=torch.uint8, count=info.bytes, offset=offset - start)
    if offset % info.dtype.itemsize:
        flat = flat.clone()  # written without alignment
    return flat.view(info.dtype).reshape(info.shape)


def _index_in(folder: Path) -> Path:
    if (folder / "transformer").is_dir():
        folder = folder / "transformer"
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) != 1:
        raise UsageError(
            f"{folder} is a folder with {len(found)} files *.safetensors.index.json, where one is needed. "
            "Name the checkpoint file itself."
        )
    return found[0]


def _shard_of(index: Path) -> dict[str, str]:
    """The shard of each tensor, a file beside the index."""
    if index.stat().st_size > _LARGEST_HEADER:
        raise _damaged(index, "it is too large for an index")
    shard_of = _json_object(index.read_bytes(), index).get("weight_map")
    # Shards lie beside their index: a name with a folder in it could point anywhere.
    if not isinstance(shard_of, dict) or not all(
        isinstance(shard, str) and shard.endswith(".safetensors") and not re.search(r"[/\\:\0]", shard)
        for shard in shard_of.values()
    ):
        raise _damaged(index, "it has no table that names shards")
    return shard_of


def _open_sharded(index: Path) -> Checkpoint:
    shard_of = _shard_of(index)
    files = sorted(set(shard_of.values()))
    if missing := [shard for shard in files if not os.path.isfile(index.parent / shard)]:
        raise SpecarError(
            f"{index.parent} lacks {len(missing)} of {len(files)} shards: {some(missing)}. Download them."
        )
    shards = {shard: open_checkpoint(index.parent / shard) for shard in files}
    if lost := [name for name, shard in shard_of.items() if name not in shards[shard].names]:
        raise _damaged(index, f"{len(lost)} tensors are not in the shard it names: {some(lost)}")
    size = sum(shard.bytes for shard in shards.values())
    names = {name: shards[shard].names[name] for name, shard in shard_of.items()}
    return Checkpoint(index, size, size, names, {}, lambda name: shards[shard_of[name]].tensor(name))


# ------------------------------------------------------------------------------------------- torch files

# What the pickle of a table of tensors refers to. torch's own weights_only list is wider: it has `bytearray`, with
# which a file of 200 bytes asks for any amount of memory.
_TENSOR_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)|torch\.storage UntypedStorage"
    r"|torch (\w+Storage|Size|(bfloat|float|uint|int)\d+\w*)"
)
# What torch.load raises for a crafted pickle depends on which opcode was bent.
_TORCH_LOAD_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
)
_OTHER_GLOBALS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")  # opcodes that torch.save does not write


def _open_torch(path: Path, head: bytes) -> Checkpoint:
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        if head.startswith(b"PK\x03\x04"):
            raise SpecarError(f"{path} is cut off: {size:,} bytes, and no table at the end. Download it again.")
        raise SpecarError(f"{path} is not a zip-based torch file. Save it again with torch 1.6 or newer.")
    _check_pickle(path, _pickle_of(path))
    if path.suffix == ".safetensors":  # torch.load goes by the suffix
        raise SpecarError(f"{path} is a torch file under the wrong name. Rename it to {path.stem}.pt.")
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except _TORCH_LOAD_ERRORS as error:
        raise _damaged(path, "torch cannot read it as tensors") from error
    for key in ("generator_ema", "generator", "model"):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
            break
    tensors = {k: v.detach() for k, v in tree.items() if isinstance(v, Tensor)} if isinstance(tree, dict) else {}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise _damaged(path, "it holds no table of named tensors")
    names = {k: TensorInfo(t.dtype, tuple(t.shape), t.numel() * t.itemsize) for k, t in tensors.items()}
    # A stride of 0 makes a tensor of any size out of a few bytes.
    if large := [name for name, info in names.items() if info.bytes > size]:
        raise _damaged(path, f"{_printable(large[0])} is larger than the file")
    return Checkpoint(path, size, size, names, {}, tensors.__getitem__)


def _pickle_of(path: Path) -> bytes:
    """The pickle in a torch archive, after checking that nothing in the archive unpacks to more than is there."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if entry.filename.split("/")[1:] == ["data.pkl"]]
            stored = all(entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1 for entry in entries)
            honest = sum(max(entry.file_size, entry.compress_size) for entry in entries) <= path.stat().st_size
            if pickles and stored and honest and pickles[0].file_size <= _LARGEST_HEADER:
                return archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise _damaged(path, "its archive is broken") from error
    if pickles:
        raise _damaged(path, "its archive is packed or lies about its size, which torch's never do")
    raise SpecarError(f"{path} is a zip archive, but not a torch file. Unpack it and use what is inside.")


def _check_pickle(path: Path, text: bytes) -> None:
    try:
        for code, argument, _ in pickletools.genops(text):
            name = str(argument) if code.name == "GLOBAL" else code.name
            if name in _OTHER_GLOBALS or code.name == "GLOBAL" and not _TENSOR_GLOBALS.fullmatch(name):
                raise SpecarError(f"{path} asks for {_printable(name)}, not only for tensors, and is not unpickled.")
    except ValueError as error:
        raise _damaged(path, "its pickle is broken") from error
