"""Bytes, seconds and budgets: how they are read from a user and shown to one.

GiB is 2^30 everywhere in hilore; on input the decimal forms (`GB` = 10^9) are understood as well.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from hilore_plan.errors import UsageError

BudgetKind = Literal["gc", "store", "bytes", "device"]

FORMS = (
    "1.1x-gc (of gradient checkpointing's peak), 0.8x-store (of store-everything's), 40GiB, 512MB, "
    "or 80% (of the device)"
)

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_RATIO = re.compile(rf"{_NUMBER}\s*x-(gc|store)", re.IGNORECASE)
_BYTES = re.compile(rf"{_NUMBER}\s*([KMGT]?i?B)", re.IGNORECASE)
_PERCENT = re.compile(rf"{_NUMBER}\s*%")


@dataclass(frozen=True)
class Budget:
    """A limit on peak memory, as the user asked for it.

    `value` is a factor for the kinds `gc`, `store` and `device` (80 % is 0.8), and bytes for the kind `bytes`.
    """

    asked: str
    kind: BudgetKind
    value: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `1.1x-gc`, `0.8x-store`, `40GiB`, `512MB` or `80%`.

        Raises:
            UsageError: for anything else, naming the accepted forms.
        """
        asked = text.strip()
        kind, value = _parsed(asked)
        if not 0 < value < math.inf:
            raise _nonsense(asked, "it must be more than nothing and finite")
        if kind == "device" and value > 1:
            raise _nonsense(asked, "a share of the device cannot be above 100%")
        return cls(asked, kind, value)

    def resolve(self, gc_bytes: int, store_bytes: int, device_bytes: int | None = None) -> int:
        """The limit in bytes, given the measured peaks of the two plain modes and the size of the device.

        Raises:
            UsageError: if it is a share of the device and the device's memory is not known.
        """
        if self.kind == "bytes":
            return int(self.value)
        base = {"gc": gc_bytes, "store": store_bytes, "device": device_bytes}[self.kind]
        if base is None:
            raise UsageError(
                f"the budget {self.asked!r} is a share of the device, but the device's memory is not known here",
                hint="give the budget in bytes (40GiB) or relative to gradient checkpointing (1.1x-gc)",
            )
        return math.floor(self.value * base)


def format_bytes(count: float) -> str:
    """`1.50 GiB`, `12.3 MiB`, `512 B`: three digits at least, in powers of 1024."""
    if count < 0:
        return "-" + format_bytes(-count)
    if count < 1024:
        return f"{count:.0f} B"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        size, unit = size / 1024, larger
        if size < 999.95:  # what would print as 1000.0 moves to the next unit
            break
    return f"{size:.2f} {unit}" if size < 9.995 else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """`2 h 05 min`, `3 min 04 s`, `12.3 s`, `45.1 ms`, `2.0 us`."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds >= 59.95:
        return _long_time(round(seconds))
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return _short_time(seconds * factor, unit)
    return f"{seconds * 1e6:.1f} us" if seconds else "0 s"


def _short_time(amount: float, unit: str) -> str:
    return f"{amount:.2f} {unit}" if amount < 9.995 else f"{amount:.1f} {unit}"


def _long_time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _parsed(asked: str) -> tuple[BudgetKind, float]:
    if found := _RATIO.fullmatch(asked):
        return ("gc" if found[2].lower() == "gc" else "store"), float(found[1])
    if found := _BYTES.fullmatch(asked):
        return "bytes", float(found[1]) * _BYTE_UNITS[found[2].upper()]
    if found := _PERCENT.fullmatch(asked):
        return "device", float(found[1]) / 100
    raise _nonsense(asked, "it is in no known form")


def _nonsense(asked: str, reason: str) -> UsageError:
    return UsageError(f"the budget {asked!r} makes no sense: {reason}", hint=f"a budget is one of {FORMS}")
