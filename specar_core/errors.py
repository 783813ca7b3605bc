"""Errors meant for the user: one or two lines that say what is wrong, the value, and what to do."""


class SpecarError(RuntimeError):
    """The work failed (a file, the disk, the device, the model). The command line exits with 1."""


class UsageError(ValueError):
    """The request itself is wrong, and nothing was started. The command line exits with 2."""


def first_line(error: BaseException) -> str:
    """Of what an error says, which may be long; its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def reason(error: Exception) -> str:
    """What an error of the system or of FFmpeg says, without its number and its file, which the message names."""
    return getattr(error, "strerror", None) or str(error)
