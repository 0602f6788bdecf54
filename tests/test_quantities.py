"""Budgets are read in each of their forms and refused in every other; bytes and seconds print as people write them."""

from __future__ import annotations

import pytest

from hilore_plan.errors import UsageError
from hilore_plan.quantities import Budget, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("text", "kind", "limit"),
    [
        ("1.1x-gc", "gc", 1100),
        ("1X-GC", "gc", 1000),
        ("0.8x-store", "store", 1600),
        (" .5x-store ", "store", 1000),
        ("40GiB", "bytes", 40 * 2**30),
        ("512MB", "bytes", 512 * 10**6),
        ("1.5 GB", "bytes", 1_500_000_000),
        ("3kib", "bytes", 3072),
        ("700B", "bytes", 700),
        ("80%", "device", 3200),
        ("100 %", "device", 4000),
    ],
)
def test_budget_forms(text: str, kind: str, limit: int) -> None:
    budget = Budget.parse(text)
    assert budget.kind == kind
    assert budget.asked == text.strip()
    assert budget.resolve(gc_bytes=1000, store_bytes=2000, device_bytes=4000) == limit


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x-gc",
        "1.1x",
        "1.1gc",
        "fast",
        "-1GiB",
        "0x-gc",
        "0MB",
        "110%",
        "nan%",
        "infGB",
        "1e400x-gc",
        "40",
        "40 Gi",
        "9" * 400 + "x-gc",
    ],
)
def test_nonsense_budgets_name_the_accepted_forms(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Budget.parse(text)
    assert "1.1x-gc" in caught.value.hint
    assert "40GiB" in caught.value.hint
    assert repr(text.strip()) in caught.value.message


def test_a_share_of_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="not known") as caught:
        Budget.parse("80%").resolve(gc_bytes=1, store_bytes=2)
    assert "1.1x-gc" in caught.value.hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 2**20, "1.50 GiB"),
        (12 * 2**20 + 2**19, "12.5 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2.0 us"),
        (0.0451, "45.1 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (184.2, "3 min 04 s"),
        (7500.0, "2 h 05 min"),
        (-1.5, "-1.50 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
