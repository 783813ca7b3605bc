"""The pairs, by name."""

from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:  # it imports torch, which takes more than a second
    from .base import Backbone

NAMES = ("krea", "helios", "helios-mid", "tiny")


def backbone(name: str) -> "Backbone":
    """Raises UsageError for an unknown name."""
    if name == "krea":
        from .krea import KREA

        return KREA
    if name in ("helios", "helios-mid"):
        from .helios import HELIOS, HELIOS_MID

        return HELIOS if name == "helios" else HELIOS_MID
    if name == "tiny":
        from .tiny import TINY

        return TINY
    raise UsageError(f"unknown backbone '{name}'; known are {', '.join(NAMES)}")
