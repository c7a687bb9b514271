"""The mirrors of a federation file: addresses as they are asked, and what cannot be meant."""

from __future__ import annotations

import pytest

from edgefl.config import parse
from edgefl.errors import ConfigError
from edgefl.setup.runs import run_digest


def test_addresses_are_read_as_they_are_asked() -> None:
    table = parse({"downlink": {"mirrors": ["HTTPS://Weights.example.org/a/"]}}, source="test").downlink

    assert table.mirrors == ("https://weights.example.org/a",)
    assert (table.mirrors_only, table.mirror_folder) == (False, "")


@pytest.mark.parametrize(
    ("downlink", "text"),
    [
        (
            {"mirrors": ["weights.example.org"]},
            r"downlink.mirrors: .*'weights.example.org' is no mirror: write it like",
        ),
        ({"mirrors": ["https://me:secret@x"]}, "is no mirror"),
        ({"mirrors": [f"https://m{n}" for n in range(9)]}, "at most 8 items"),
        ({"mirrors_only": True}, "mirrors_only needs mirrors"),
    ],
)
def test_what_cannot_be_meant_is_refused(downlink: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse({"downlink": downlink}, source="test")


def test_a_run_goes_on_with_other_mirrors() -> None:
    tables = {"mirrors": ["https://a"], "mirrors_only": True, "mirror_folder": "/srv/mirror"}

    assert run_digest(parse({"downlink": tables}, source="test")) == run_digest(parse({}, source="test"))
