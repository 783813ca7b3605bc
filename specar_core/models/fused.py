"""Our Triton kernels, where Triton can be had. Plain torch says the same without them."""

import functools
import logging
from importlib import import_module
from types import ModuleType

from ..errors import first_line

log = logging.getLogger("specar")


@functools.cache
def no_triton() -> str | None:
    """Why none of our kernels can run here, in one line; None if they can.

    A kernel is built when it first runs, which takes a C compiler and Python's headers beside Triton.
    """
    try:
        import_module(".probe_kernels", __package__).probe()
    except Exception as error:  # each part of that chain has errors of its own; the probe itself has nothing to fail
        return first_line(error)
    return None


@functools.cache
def triton_kernels(name: str, without: str) -> ModuleType | None:
    """The module of kernels called `name`; None where they cannot run, and it is logged what that is `without`."""
    if reason := no_triton():
        log.info("%s: Triton cannot be used here (%s)", without, reason)
        return None
    return import_module(f".{name}", __package__)
