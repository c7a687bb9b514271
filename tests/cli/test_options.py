"""What options of the command line stand for."""

from __future__ import annotations

from edgefl.cli.options import Engine
from edgefl.wire.bundle.formats import FORMATS


def test_an_engine_can_be_chosen_for_each_format() -> None:
    assert [engine.value for engine in Engine] == list(FORMATS)
