"""The small model, its tiers and codecs that tests of coding share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache

import pytest

from edgefl.config import Federation, parse
from edgefl.models.exits import early_exits
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.submodels import catalog as kinds
from edgefl.submodels.submodel import Submodel


@cache
def spec() -> ModelSpec:
    return build_model("fedbat_cnn", size=4, widths=(3, 4), classes=3, seed=1)


def submodel(kind: str, cut: int = 1) -> Submodel:
    if kind == "early_exit":
        return kinds.build(early_exits(base="fedbat_cnn", size=4, widths=(3, 4), classes=3), kind, exit=2)
    return kinds.build(spec(), kind, **({"cut": cut} if kind == "output_side" else {"gamma": 0.25}))


def federation(codec: str, options: dict[str, object], algorithm: str = "sgd") -> Federation:
    table = {
        "codec": {"name": codec, "options": options},
        "algorithm": {"name": algorithm, "batch": 2, "steps": 3},
    }
    return parse(table, source="parity")


@pytest.fixture(autouse=True)
def silence() -> Iterator[list[str]]:
    """Nothing is left for a person to read: what the exporter says of an op is settled where the op is made."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("onnx_ir").addHandler(handler)
    yield said
    logging.getLogger("onnx_ir").removeHandler(handler)
    assert not said
