"""What `edgefl device` makes of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.cli.options import parse_bytes
from edgefl.errors import ConfigError
from edgefl.wire import folders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12B", 12),
        ("64M", 64 << 20),
        ("64K", 64 << 10),
        ("1g", 1 << 30),
        ("1.5 MiB", 3 << 19),
        ("2KB", 2000),
        ("7B", 7),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "-1", "-2MiB", "1e400", "", "MB", "5X", "1e99GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory: .* is not a size"):
        parse_bytes(text, "--memory")


def test_a_number_without_a_unit_is_no_memory() -> None:
    with pytest.raises(ConfigError, match="--memory: '64' has no unit; write 64MiB, or 64B for bytes"):
        parse_bytes("64", "--memory")


def test_two_federations_of_one_device_have_two_stores() -> None:
    assert folders.store("demo", "phone") == Path.home() / ".edgefl" / "demo" / "phone"
