"""Finished frames become an mp4 while the next block is generated.

A worker thread encodes behind a bounded queue, so memory does not grow with the length of the video. Every few
blocks a fresh encoder starts: a segment then depends on nothing but its own frames, which is what lets a resumed
run give the same video as an uninterrupted one. Whole segments lie in `FILE.run/`, playable by themselves, and
become `FILE.mp4` by copying their packets, without a second encoding.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from shlex import quote

import numpy as np
import torch

from .audio import SoundTrack, has_sound
from .checkpoint import TOLD, read_run, used
from .errors import SpecarError, UsageError, reason
from .mp4 import is_whole
from .writing import keep, no_folder, replacing, writable, write

log = logging.getLogger("specar")

# What makes a segment's bytes a function of its frames. The number of threads changes x264's decisions, so it must
# not follow the machine. The macroblock tree reads memory that nobody wrote: its bytes differ from run to run (x264
# core 164 and 165; seen with glibc's MALLOC_PERTURB_), and without it a file is 5 to 40 % larger and slightly better.
# `stitchable` is for segments that will be put together: no headers that depend on the pictures.
X264_OPTIONS = {"threads": "4", "x264-params": "mbtree=0:stitchable=1"}
REORDERED = 2  # frames that x264's B-frames (with pyramid, its default) are decoded ahead of being shown
BT709, LIMITED_RANGE = 1, 1  # code points of ITU-T H.273, and AVCOL_RANGE_MPEG


def check_name(path: Path) -> None:
    """UsageError if no video is written to such a path."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; add a file name ending in .mp4.")
    if path.suffix.lower() != ".mp4":
        raise UsageError(f"{path} does not end in .mp4, the only format written here.")


def check_place(path: Path, folder: Path, *, overwrite: bool, continues: bool = False) -> None:
    """UsageError if no video is written to such a `path`, or would replace something, SpecarError if nothing can be.

    folder: where its run is kept; continues: goes on with the one that is there.
    """
    check_name(path)
    report, partial = path.with_suffix(".json"), partials(folder)
    for file in (report, *partial):
        no_folder(file)
    for place in (path.parent, folder):
        there = next((parent for parent in (place, *place.parents) if parent.exists()), place)
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise SpecarError(f"Cannot write in {there}. Choose another folder.")
    if overwrite:
        return
    if used(folder) and not continues:
        if (folder / TOLD).exists():
            read_run(folder)  # one that cannot be continued says so
        todo = f"go on with `specar resume {quote(str(folder))}`, choose another name, or start again with --overwrite"
        raise UsageError(f"{folder} holds an unfinished video: {todo}.")
    keep(path, report, *(() if continues else partial))


def partials(folder: Path) -> tuple[Path, Path]:
    """The video and the report that an unfinished run leaves beside its folder."""
    return folder.with_suffix(".partial.mp4"), folder.with_suffix(".partial.json")


def to_rgb8(frames: torch.Tensor) -> torch.Tensor:
    """[B, 3, T, H, W] in [-1, 1] on any device -> uint8 [B, T, H, W, 3] on the CPU; rounded and clamped."""
    levels = frames.float().add(1).mul_(127.5).round_().clamp_(0, 255)  # float32: bf16 cannot hold 256 levels
    found = levels.to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()
    if not found.is_cuda:
        return found
    # Pinned memory is reached ten times as fast, and torch keeps it for the next block.
    return torch.empty_like(found, device="cpu", pin_memory=True).copy_(found)


class VideoWriter:
    """Writes FILE.mp4 block by block: H.264, yuv420p, bt709, fast start.

    Make it before the expensive work: it refuses at once what could not be written later. Use it as a context
    manager and call `finish`; leaving without that, by an exception or not, keeps the blocks so far (`abort`).

    `folder` holds the segments, by default FILE.run beside FILE.mp4; what an unfinished run leaves is called like it,
    FILE.partial.mp4. `keep_blocks` continues an earlier run: whole segments within its first `keep_blocks` blocks are
    kept, and blocks are added from `blocks_done` on. None starts anew. audio: a video file whose sound is taken.

    Raises UsageError for a path that must not be written, SpecarError for one that cannot.
    """

    def __init__(
        self,
        path: str | Path,
        fps: int | Fraction,
        width: int,
        height: int,
        *,
        crf: int = 17,
        blocks_per_segment: int = 4,
        queue_blocks: int = 2,
        folder: str | Path | None = None,
        keep_blocks: int | None = None,
        overwrite: bool = False,
        audio: Path | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.folder = Path(folder).absolute() if folder else self.path.with_suffix(".run")
        self.partial_path, _ = partials(self.folder)
        self.encode_seconds = 0.0
        self._fps, self._size, self._crf = Fraction(fps), (width, height), crf
        self._blocks_per_segment = blocks_per_segment
        self._queue_blocks = queue_blocks
        self._continues = keep_blocks is not None
        self._overwrite = overwrite
        self._audio = audio

        self._check_target()
        self._finished = self._open_folder((keep_blocks or 0) // blocks_per_segment)
        self._segment: _Segment | None = None
        self._broken = self._ended = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="specar-encode")
        self._pending: deque[Future[None]] = deque()
        if width % 2 or height % 2:
            log.warning("H.264 needs even sizes: the last column or row of %dx%d is repeated.", width, height)

    @property
    def blocks_done(self) -> int:
        """Blocks in whole segments: safe on the disk. A continued run goes on with this block."""
        return self._finished * self._blocks_per_segment

    def add_block(self, frames: torch.Tensor) -> None:
        """Queues uint8 frames [T, H, W, 3], which must not change afterwards; waits while the queue is full.

        Raises SpecarError when an earlier block could not be written.
        """
        width, height = self._size
        if frames.dtype != torch.uint8 or frames.shape[1:] != (height, width, 3):
            raise ValueError(f"frames are {frames.dtype} {tuple(frames.shape)}, not uint8 [T, {height}, {width}, 3]")
        while self._pending and (self._pending[0].done() or len(self._pending) >= self._queue_blocks):
            self._pending[0].result()
            self._pending.popleft()
        self._pending.append(self._worker.submit(self._encode, frames.numpy()))

    def close(self) -> None:
        """Encodes what is queued and takes no more blocks. Then `encode_seconds` is whole: the rest is copied."""
        self._worker.shutdown()
        if self._segment is not None and self._segment.blocks and not self._segment.data:
            started = time.perf_counter()
            self._segment.close()  # x264 holds back some dozens of frames
            self.encode_seconds += time.perf_counter() - started

    def finish(self, metadata: Mapping[str, str]) -> Path:
        """Joins everything into FILE.mp4 with `metadata` (key to text) and removes the segments."""
        self.close()
        for block in self._pending:
            block.result()
        if self.path.exists() and not self._overwrite:
            raise SpecarError(f"{self.path} appeared while this video was made, and is not overwritten.")
        writable(self.path)  # its folder may be gone by now, where the segments lie elsewhere
        _join(self._sources(), self.path, self._fps, metadata, self._audio)
        self._ended = True
        with contextlib.suppress(OSError):  # the video is whole; what cannot be removed does no harm
            if self._continues or self._overwrite:
                self.partial_path.unlink(missing_ok=True)
            for segment in self.folder.glob("segment-*"):
                segment.unlink()
            self.folder.rmdir()  # fails while others keep files in it
        return self.path

    def abort(self, metadata: Mapping[str, str] | None = None) -> Path | None:
        """Joins the blocks added so far into FILE.partial.mp4; returns its path, or None without a block.

        The segments stay, for a run that continues. On a full disk they are all that stays: that is logged, and
        None returned.
        """
        self.close()
        self._ended = True
        try:
            sources = self._sources()
            if sources:
                _join(sources, self.partial_path, self._fps, metadata or {}, self._audio)
        except SpecarError as error:
            kept = f" The finished parts are in {self.folder}" if used(self.folder) else ""
            log.error("%s%s", error, kept)
            return None
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # fails while there are segments in it
        return self.partial_path if sources else None

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._ended and (partial := self.abort()):
            log.warning("The finished blocks are in %s", partial)

    def _check_target(self) -> None:
        import av

        check_place(self.path, self.folder, overwrite=self._overwrite, continues=self._continues)
        try:
            av.codec.Codec("libx264", "w")
        except ValueError as error:
            raise SpecarError("This PyAV has no libx264; install the usual build: pip install av") from error

    def _open_folder(self, most: int) -> int:
        """Makes the folders, proves that they can be written, and returns how many segments are kept."""
        writable(self.path, self._segment_path(0))
        try:
            kept = 0
            while kept < most and is_whole(self._segment_path(kept)):
                kept += 1
            rest = set(self.folder.glob("segment-*.mp4")) - {self._segment_path(index) for index in range(kept)}
            for segment in rest:
                segment.unlink()
        except OSError as error:
            raise SpecarError(f"Cannot write {self.path}: {reason(error)}. Choose another folder.") from error
        return kept

    def _segment_path(self, index: int) -> Path:
        return self.folder / f"segment-{index:05d}.mp4"

    def _encode(self, frames: np.ndarray) -> None:
        """Runs in the worker. After a failure nothing more is taken: it would leave a hole in the video."""
        if self._broken:
            return
        self._broken = True
        started = time.perf_counter()
        if self._segment is None:
            self._segment = _Segment(self._fps, *self._size, self._crf)
        self._segment.add(frames)
        if self._segment.blocks == self._blocks_per_segment:
            data = self._segment.close()
            write(self._segment_path(self._finished), data)
            self._segment = None
            self._finished += 1
        self.encode_seconds += time.perf_counter() - started
        self._broken = False

    def _sources(self) -> list[Path | io.BytesIO]:
        """What is finished, in order: segments on the disk, then the unfinished one from memory."""
        sources: list[Path | io.BytesIO] = []
        for index in range(self._finished):
            if not self._segment_path(index).exists():
                raise SpecarError(f"{self._segment_path(index)} was removed while the video was made.")
            sources.append(self._segment_path(index))
        if self._segment is not None and self._segment.blocks:
            sources.append(io.BytesIO(self._segment.close()))
        return sources


class _Segment:
    """Some blocks as an mp4 of their own, in memory (a few megabytes) until it is whole."""

    def __init__(self, fps: Fraction, width: int, height: int, crf: int) -> None:
        import av

        self.blocks = 0
        self._frames, self._tick = 0, 1 / fps
        self.data = b""
        self._file = io.BytesIO()
        self._container = av.open(self._file, "w", format="mp4")
        self._stream = self._container.add_stream("libx264", rate=fps, options={"crf": str(crf), **X264_OPTIONS})
        self._stream.width, self._stream.height = width + width % 2, height + height % 2
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = BT709
        context.color_range = LIMITED_RANGE

    def add(self, frames: np.ndarray) -> None:
        import av

        _, height, width, _ = frames.shape
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        for frame in frames:
            # Of swscale's filters, area is the one whose chroma is rounded and not cut off: no colour cast.
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(
                format="yuv420p",
                src_colorspace="ITU709",
                dst_colorspace="ITU709",
                src_color_range="JPEG",
                dst_color_range="MPEG",
                interpolation="AREA",
            )
            picture.pts, picture.time_base = self._frames, self._tick
            self._container.mux(self._stream.encode(picture))
            self._frames += 1
        self.blocks += 1

    def close(self) -> bytes:
        if not self.data:
            self._container.mux(self._stream.encode())
            self._container.close()
            self.data = self._file.getvalue()
        return self.data


def _join(
    sources: Sequence[Path | io.BytesIO], target: Path, fps: Fraction, metadata: Mapping[str, str], audio: Path | None
) -> None:
    """Copies the packets of all sources into one file, one frame after another, and renames it to `target`."""
    import av

    size = sum(s.stat().st_size if isinstance(s, Path) else len(s.getvalue()) for s in sources)
    # The file counts its length in this unit, by default milliseconds, which cuts part of a frame off.
    options = {"movflags": "faststart+use_metadata_tags", "movie_timescale": str(fps.numerator)}
    with (
        replacing(target, size) as part,
        av.open(part, "w", format="mp4", options=options) as output,
    ):
        # Text from outside may hold halves of surrogate pairs, which UTF-8 has no bytes for.
        output.metadata.update({key: text.encode("utf-8", "replace").decode() for key, text in metadata.items()})
        stream, headers, track, count = None, None, None, 0
        for source in sources:
            with av.open(source, "r") as segment:
                video = segment.streams.video[0]
                if stream is None:
                    stream = output.add_stream_from_template(video, opaque=True)
                    headers = video.codec_context.extradata
                    track = SoundTrack(output, audio) if audio and has_sound(audio) else None
                if video.codec_context.extradata != headers:
                    raise SpecarError(f"{source} was encoded in another way than the segments before it.")
                start = count
                for packet in segment.demux(video):
                    if packet.pts is None or packet.duration is None:  # the empty packet that ends a stream
                        continue
                    packet.pts = start + packet.pts // packet.duration
                    packet.dts = count - REORDERED
                    packet.duration, packet.time_base = 1, 1 / fps
                    packet.stream = stream
                    output.mux(packet)
                    count += 1
                    if track:
                        output.mux(list(track.until(count / fps)))
        if track:
            output.mux(list(track.end()))
