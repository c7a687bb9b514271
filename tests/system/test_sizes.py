"""Sizes as people write them and as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgefl.cli.models.plan import PlanOptions, read_device
from edgefl.cli.options import parse_bytes
from edgefl.config.tables import TierTable
from edgefl.errors import ConfigError
from edgefl.system import sizes
from edgefl.system.sizes import parse_budget, parse_size
from edgefl_export.memory.recompute import Budget

SIZES = [
    ("0B", 0),
    ("12B", 12),
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
    ("1.9b", 1),
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
    assert parse_size(text) == parse_bytes(text, "--memory") == count
    if count:
        assert parse_budget(text) == (count, False)
        assert Budget.parse(text) == Budget(count)
        assert TierTable(memory_budget=text).memory_budget == text


@pytest.mark.parametrize("text", ["0", "64", " 64 ", "1.5", "67108864"])
def test_a_number_without_a_unit_is_refused_with_what_to_write(text: str) -> None:
    remedy = f"has no unit; write {text.strip()}MiB, or {text.strip()}B for bytes"
    for read in (parse_size, parse_budget, lambda text: TierTable(memory_budget=text)):
        with pytest.raises(ValueError, match=re.escape(remedy)):
            read(text)
    for refused in (lambda: parse_bytes(text, "--memory"), lambda: PlanOptions(memory=text).device):
        with pytest.raises(ConfigError, match=re.escape(remedy)):
            refused()


def test_a_bare_number_in_a_device_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "phone.toml").write_text("memory = 64\n")
    with pytest.raises(ConfigError, match="'64' has no unit; write 64MiB"):
        _ = read_device(tmp_path / "phone.toml").device


@pytest.mark.parametrize("text", [*NONE, "1e99GB", f"{2**60 + 2**10}B", "9" * 400 + "B"])
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


@pytest.mark.parametrize("text", ["0B", "0%", "0.4B", "%", "50%%", "50 %B"])
def test_a_budget_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a memory budget is"):
        parse_budget(text)


def test_the_largest_size_is_read() -> None:
    assert parse_size(f"{2**60}B") == 2**60


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
