"""The names that `import edgefl` gives: whole, in step with the catalogs, and light where torch is not needed."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest

import edgefl
from edgefl.algorithms.catalog import ALGORITHMS
from edgefl.codecs.catalog import CODECS
from edgefl.contract.choice import CatalogEntry
from edgefl.models.losses import LOSSES
from edgefl.optimizers.catalog import OPTIMIZERS
from edgefl.submodels.catalog import KINDS
from tests.support.commands import run_python
from tests.support.errors import ConfigError, refuses

BOTH = "fedbat"
"""A codec that belongs to the algorithm of its name: as an object there is the algorithm."""


def test_every_public_name_is_there_and_listed_for_type_checkers() -> None:
    tree = ast.parse(Path(edgefl.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assigned = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]

    assert {name for name in imported | assigned if not name.startswith("_")} == set(edgefl.__all__)
    assert all(getattr(edgefl, name) is not None for name in edgefl.__all__)
    assert len(edgefl.__all__) <= 40 and edgefl.__version__.count(".") >= 1


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("nothing", ""),
        ("FedProx", "; it is edgefl.algorithms.FedProx"),
        ("Dataset", "; it is edgefl.data.Dataset"),
    ],
)
def test_a_name_that_moved_into_a_namespace_is_found_there(name: str, place: str) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(edgefl, name)

    assert (str(refused.value), refused.value.name) == (
        f"module 'edgefl' has no attribute '{name}'{place}",
        name,
    )


def test_objects_take_the_options_of_their_factories() -> None:
    spaces = (edgefl.algorithms, edgefl.codecs, edgefl.losses, edgefl.optimizers, edgefl.submodels)
    named = [
        thing
        for space in spaces
        for thing in map(partial(getattr, space), space.__all__)
        if isinstance(thing, CatalogEntry)
    ]
    factories = {
        **ALGORITHMS,
        **LOSSES,
        **KINDS,
        **OPTIMIZERS,
        **{name: each for name, each in CODECS.items() if name != BOTH},
    }

    assert {each.name: each.factory for each in named} == factories
    assert len({each.label for each in named}) == len(named)


def test_a_choice_is_plain_data_that_reads_as_it_was_written() -> None:
    choice = edgefl.algorithms.FedBAT(rho=6.0)

    assert repr(choice) == "FedBAT(rho=6.0)"
    assert (choice.name, dict(choice.options)) == ("fedbat", {"rho": 6.0})
    assert choice == edgefl.algorithms.FedBAT(rho=6.0) != edgefl.algorithms.FedBAT(rho=5.0)
    assert edgefl.algorithms.SGD(lr=0.1).personal(0.01).options == {"lr": 0.1, "personal": 0.01}


def test_a_wrong_option_is_told_with_what_there_is() -> None:
    with refuses(ConfigError, unknown=["cuts"], accepted=["cut", "chunks", "skip"]):
        edgefl.submodels.OutputSide(cuts=3)  # type: ignore[call-arg]
    with refuses(ConfigError, option="cut"):
        edgefl.submodels.OutputSide(cut="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by name"):
        edgefl.submodels.OutputSide(3)  # type: ignore[misc]


def test_the_device_half_is_there_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import edgefl\n"
        "edgefl.Agent, edgefl.train_round, edgefl.Bundle, edgefl.EdgeflError\n"
        "print(sorted({'onnx', 'pydantic', 'sqlalchemy', 'typer'} & set(sys.modules)))\n"
    )
    done = run_python("-c", code, check=True)

    assert done.stdout.strip() == "[]"
