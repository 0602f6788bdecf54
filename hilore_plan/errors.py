"""The exception tree: every error a user can meet, with its hint and exit code.

Anything that derives from `HiloreError` is caught once, in `cli.app`, and shown as one line and a hint.
"""

from __future__ import annotations


class HiloreError(Exception):
    """Base of all errors that hilore raises on purpose.

    Args:
        message: what is wrong and where, in one line.
        hint: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(HiloreError):
    """An argument or option that makes no sense."""


class FileError(HiloreError):
    """A profile, plan or bench file that is missing, corrupt, of an unknown schema, or cannot be written."""


class PlanMismatchError(HiloreError):
    """A plan that was made for another model or another block graph."""


class InfeasibleBudgetError(HiloreError):
    """A budget below the least peak that any plan can reach; `least_bytes` is that peak."""

    def __init__(self, message: str, hint: str = "", least_bytes: int = 0) -> None:
        super().__init__(message, hint)
        self.least_bytes = least_bytes


class DeviceError(HiloreError):
    """A device that is asked for but not there."""


class RefusedError(HiloreError):
    """Something that cannot be done safely, refused by name."""


class CaptureError(HiloreError):
    """A block whose forward cannot be captured as a graph; the runtime falls back to checkpointing it."""


class CodecError(HiloreError):
    """A codec that does not exist or does not fit the interface, or a tensor that a codec refuses."""


class RecoveryError(HiloreError):
    """A saved tensor that cannot be given back as it was: changed in place, or rebuilt differently."""

    exit_code = 1


class ProcessError(HiloreError):
    """A process that measures came to an end by itself."""

    exit_code = 1
