"""Where the `specar` command begins, and how Ctrl-C ends it: in one line, also while modules are being imported."""

import signal
import sys
from types import FrameType
from typing import Any


def interrupt(kind: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt; in an import at its end: torch catches it there, and goes on with half of numpy."""
    importing = None
    while frame:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            importing = frame
        frame = frame.f_back
    if not importing:
        raise KeyboardInterrupt

    def ended(frame: FrameType, event: str, _: Any) -> None:
        if frame is importing and event == "return":
            raise KeyboardInterrupt

    sys.setprofile(ended)  # which an exception of its own ends


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)  # a polite kill keeps the finished blocks, like Ctrl-C
    try:
        try:
            from .cli import main as run

            run()
        finally:  # one more would only spoil the end
            for kind in (signal.SIGINT, signal.SIGTERM):
                signal.signal(kind, signal.SIG_IGN)
    except KeyboardInterrupt:
        sys.stderr.write("specar: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
