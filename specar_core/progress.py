"""How long work says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is done; how much of it is done, and how much it is in all
