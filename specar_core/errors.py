"""Errors meant for the user: one or two lines that say what is wrong, the value, and what to do."""


class SpecarError(RuntimeError):
    """The work failed (a file, the disk, the device, the model). The command line exits with 1."""


class UsageError(ValueError):
    """The request itself is wrong, and nothing was started. The command line exits with 2."""
