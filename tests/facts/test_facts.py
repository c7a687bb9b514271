"""The shipped facts are those of the catalogs, and commands that need no more import no torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs.catalog import CODECS
from edgefl.facts import PLACE, FactoryOption, encode, problem_of, shipped, type_of
from edgefl.optimizers import OPTIMIZERS
from edgefl.submodels.catalog import KINDS
from tools.facts import _written, live_facts

COMMANDS = [
    ["ls", "models"],
    ["ls", "algorithms", "fafed"],
    ["ls", "codecs", "--json"],
    ["--help"],
    ["run", "--help"],
    ["validate", "CONFIG"],
    ["validate", "--template"],
    ["cache"],
]
# In turn in one process: each command is told with what was loaded by its end.
WITHOUT_TORCH = """
import json, sys
from edgefl.cli import main
loaded = {}
for words in json.load(sys.stdin):
    sys.argv = ["edgefl", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
    loaded[" ".join(words)] = sorted({"torch", "onnx", "executorch", "pandas"} & set(sys.modules))
print()
print(json.dumps(loaded))
"""


@pytest.mark.slow
def test_the_shipped_facts_are_those_of_the_catalogs() -> None:
    live = msgspec.json.decode(encode(live_facts()))
    told = "the catalogs have changed: `make facts` writes the file anew"
    for part, facts in json.loads(PLACE.read_text()).items():
        assert facts == live[part], f"{part}: {told}"
    assert live.keys() == json.loads(PLACE.read_text()).keys(), told


@pytest.mark.parametrize("catalog", [ALGORITHMS, KINDS, OPTIMIZERS, CODECS], ids=len)
def test_types_of_options_are_read_back_as_written(catalog: Mapping[str, Callable[..., Any]]) -> None:
    for factory in catalog.values():
        hints = typing.get_type_hints(factory)
        for name, parameter in inspect.signature(factory).parameters.items():
            if parameter.default is not parameter.empty:
                text = _written(hints[name])
                assert type_of(text) == hints[name], (factory, name, text)


def test_a_value_of_another_type_is_told_as_the_live_catalog_tells_it() -> None:
    bits = shipped().codecs["fedpaq"]["bits"]
    assert problem_of(bits, 3) == "" and "Expected `int`, got `str`" in problem_of(bits, "3")
    assert problem_of(FactoryOption(type="Literal['a', 'b'] | None"), "c")
    assert problem_of(FactoryOption(type="tuple[float, float] | None"), [1, 2.5]) == ""
    assert problem_of(FactoryOption(), object()) == "", "of a type that no file holds nothing is said"


def test_what_needs_no_model_imports_no_torch(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text('[model]\nname = "resnet8"\n[codec]\nname = "fedpaq"\n[tiers.weak]\ncut = 2\n')
    commands = [[str(config) if each == "CONFIG" else each for each in words] for words in COMMANDS]

    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {" ".join(words): [] for words in commands}
