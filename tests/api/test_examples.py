"""The examples in the docstrings of the API do what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

import edgefl

MODULES = ("compile", "federation", "run")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"edgefl.api.{name}")
    done = doctest.testmod(module, extraglobs={"edgefl": edgefl}, optionflags=doctest.ELLIPSIS)

    assert done.attempted > 0
    assert done.failed == 0
