"""The sound of a source video, cut or padded to the length of the video that follows it."""

import itertools
import logging
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .errors import reason
from .source import video_stream

log = logging.getLogger("specar")

RATE = 48000
GAP = RATE // 20  # samples that may be missing before silence stands for them: a resampler is late by some dozens


def has_sound(path: Path) -> bool:
    import av

    try:
        with av.open(str(path)) as container:
            return bool(container.streams.audio and container.streams.audio[0].codec_context)
    except (OSError, av.FFmpegError) as error:
        log.warning("The sound of %s cannot be read: %s", path, error)
        return False


class SoundTrack:
    """The sound of a video file, from its first frame on, as an output stream's packets up to any time.

    Silence stands for what is missing at either end or between, for what cannot be decoded, and for values that are no
    numbers.
    """

    def __init__(self, output: Any, path: Path) -> None:
        self._stream = output.add_stream("aac", rate=RATE, layout="stereo")
        self._pieces = _aligned(path)
        self._rest = np.zeros((2, 0), np.float32)
        self._made = 0

    def until(self, seconds: Fraction) -> Iterator[Any]:
        while (wanted := round(seconds * RATE) - self._made) > 0:
            if not self._rest.shape[1]:  # as the next piece may be, too
                self._rest = next(self._pieces, np.zeros((2, wanted), np.float32))
                continue
            piece, self._rest = self._rest[:, :wanted], self._rest[:, wanted:]
            yield from self._encoded(piece)

    def end(self) -> Iterator[Any]:
        yield from self._stream.encode(None)

    def _encoded(self, piece: np.ndarray) -> Iterator[Any]:
        import av

        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(piece), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._made, Fraction(1, RATE)
        self._made += piece.shape[1]
        yield from self._stream.encode(frame)


def _aligned(path: Path) -> Iterator[np.ndarray]:
    """All sound from the time of the first frame on, float32 [2, n] at 48 kHz."""
    import av

    place: int | None = None  # of the next sample, from the first frame of the video on
    try:
        with av.open(str(path)) as container:
            video = video_stream(container)
            start = float((video.start_time or 0) * (video.time_base or 1))
            resampler = av.AudioResampler(format="fltp", layout="stereo", rate=RATE)
            for frame in itertools.chain(container.decode(audio=0), [None]):  # None empties the resampler
                told = place or 0 if frame is None or frame.time is None else round((frame.time - start) * RATE)
                if place is None or told - place > GAP:
                    yield np.zeros((2, max(0, told) - max(0, place or 0)), np.float32)
                    place = told
                for part in resampler.resample(frame and _finite(frame, path)):
                    piece = part.to_ndarray()
                    yield piece[:, max(0, -place) :].clip(-1, 1)
                    place += piece.shape[1]
    except (OSError, ValueError, av.FFmpegError) as error:
        log.warning("The sound of %s is damaged, the rest is silence: %s", path, reason(error))


def _finite(frame: Any, path: Path) -> Any:
    """The frame without values that are no numbers, on which an encoder fails."""
    import av

    if not frame.format.name.startswith(("flt", "dbl")) or np.isfinite(values := frame.to_ndarray()).all():
        return frame
    log.warning("The sound of %s holds values that are no numbers: they become silence", path)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    clean = av.AudioFrame.from_ndarray(values, format=frame.format.name, layout=frame.layout.name)
    clean.sample_rate, clean.pts, clean.time_base = frame.sample_rate, frame.pts, frame.time_base
    return clean
