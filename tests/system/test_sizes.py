"""Sizes as people write them and as they are shown."""

from __future__ import annotations

import pytest

from edgefl.cli.options import parse_bytes
from edgefl.config.tables import TierTable
from edgefl.system import sizes
from edgefl.system.sizes import parse_budget, parse_size
from exporters.memory.recompute import Budget

SIZES = [
    ("0", 0),
    ("12", 12),
    ("7B", 7),
    ("64M", 64 << 20),
    ("64MiB", 64 << 20),
    (" 64 mib ", 64 << 20),
    ("64 MB", 64_000_000),
    ("64K", 64 << 10),
    ("2KB", 2000),
    ("2KiB", 2048),
    ("1g", 1 << 30),
    ("1 GB", 10**9),
    ("1GiB", 1 << 30),
    ("1.5 MiB", 3 << 19),
    (".5K", 512),
    ("1.9", 1),
]
NONE = [
    "",
    " ",
    "MB",
    "5X",
    "5 iB",
    "5BM",
    "1,5M",
    "-1",
    "-2MiB",
    "+1",
    "nan",
    "inf",
    "1e3",
    "1 2M",
    "\u0661M",
]


@pytest.mark.parametrize(("text", "count"), SIZES)
def test_a_size_has_one_meaning_wherever_it_is_written(text: str, count: int) -> None:
    assert parse_size(text) == parse_bytes(text) == count
    if count:
        assert parse_budget(text) == (count, False)
        assert Budget.parse(text) == Budget(count)
        assert TierTable(memory_budget=text).memory_budget == text


@pytest.mark.parametrize("text", [*NONE, "1e99GB", f"{2**60 + 2**10}", "9" * 400])
def test_what_is_no_size_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write 512KiB, 64MiB, 64M or 1GB"):
        parse_size(text)
    with pytest.raises(ValueError, match="such as 48MiB or a share such as 50%"):
        parse_budget(text)


@pytest.mark.parametrize(("text", "share"), [("50%", 0.5), (" 12.5 % ", 0.125), ("150%", 1.5)])
def test_a_budget_may_be_a_share(text: str, share: float) -> None:
    assert parse_budget(text) == (share, True)
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0%", "0.4", "%", "50%%", "50 %B"])
def test_a_budget_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a memory budget is"):
        parse_budget(text)


def test_the_largest_size_is_read() -> None:
    assert parse_size(str(2**60)) == 2**60


def test_sizes_are_shown_with_one_digit() -> None:
    assert (sizes.mib(3 << 19), sizes.mebibytes(3 << 19)) == ("1.5", "1.5 MiB")
    assert (sizes.size(1 << 20), sizes.size((1 << 20) - 1), sizes.size(512)) == (
        "1.0 MiB",
        "1024.0 KiB",
        "0.5 KiB",
    )


def test_a_size_that_is_asked_for_is_rounded_up() -> None:
    assert sizes.mebibytes_up(1 << 20) == "1.0 MiB"
    assert sizes.mebibytes_up((1 << 20) + 1) == "1.1 MiB"
