"""A struct takes its fields from the objects that have them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from edgefl.system.structs import filled


class Row(msgspec.Struct, kw_only=True):
    model: str
    batch: int
    ms: float
    note: str = ""


def test_own_values_come_before_those_of_the_first_source() -> None:
    settings, found = SimpleNamespace(batch=8, ms=1.0), SimpleNamespace(ms=2.0, model="mlp", other=3)

    assert filled(Row, settings, found, model="cnn") == Row(model="cnn", batch=8, ms=1.0, note="")


def test_a_field_that_no_source_has_is_an_error() -> None:
    with pytest.raises(TypeError, match="ms"):
        filled(Row, SimpleNamespace(model="mlp", batch=8))
