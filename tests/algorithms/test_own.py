"""An algorithm in a file or a module of the user's own: by its name, from any folder, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl import algorithms
from edgefl.models import user_factory as own
from edgefl.setup.federation_options import parse_algorithm
from tests.algorithms.users import Users
from tests.support.errors import ConfigError, refuses

SOURCE = """
from dataclasses import replace
from edgefl.algorithms.baselines.fedavg import fedavg

def mine(objective, *, batch: int = 4, lr: float = 0.1):
    return replace(fedavg(objective, batch=batch, lr=lr), name="{name}")

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my rules.py"
    path.write_text(SOURCE.format(name="first"))
    return path


def test_a_factory_in_a_file_is_built_with_its_options_like_any_other(file: Path) -> None:
    algorithm = algorithms.build(f"{file}:mine", Users().objective, lr=0.5)

    assert (algorithm.name, algorithm.hyper["lr"]) == ("first", 0.5)
    with refuses(ConfigError, unknown=["momentum"], accepted=["batch", "lr"]):
        algorithms.build(f"{file}:mine", Users().objective, momentum=0.9)


def test_a_file_is_one_module_until_it_is_edited(file: Path) -> None:
    name = f"{file}:mine"
    assert own.factory_of(name, "algorithm") is own.factory_of(name, "algorithm")
    before = own.source_of(name, "algorithm")
    file.write_text(SOURCE.format(name="later"))  # as long as before, and within the same second

    assert algorithms.build(name, Users().objective).name == "later"
    assert own.source_of(name, "algorithm") != before


def test_a_relative_path_is_made_absolute(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)

    assert own.absolute("my rules.py:mine") == f"{file.resolve()}:mine"
    assert own.absolute("package.module:factory") == "package.module:factory"
    assert own.absolute("fedavg") == "fedavg"
    assert algorithms.build("my rules.py:mine", Users().objective).name == "first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            r"cannot load algorithm '.*broken\.py:mine': .*broken\.py has no function 'mine'; it defines none",
        ),
        ("def other(): ...\nmine = 3", r"has no function 'mine'; it defines other"),
        (
            "x = 1\n1 / 0",
            r"cannot load algorithm '.*broken\.py:mine': ZeroDivisionError: .* \(at .*broken\.py:2\)",
        ),
        ("def mine(:\n", r"SyntaxError: .*broken\.py:1\)"),
        (
            "import no_such_thing",
            r"ModuleNotFoundError: No module named 'no_such_thing' \(at .*broken\.py:1\)",
        ),
    ],
    ids=["nothing", "no function", "an exception", "a syntax error", "an import"],
)
def test_a_file_that_cannot_be_used_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        algorithms.build(f"{tmp_path}/broken.py:mine", Users().objective)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no/such/file.py:mine",
            r"cannot load algorithm 'no/such/file\.py:mine': /.*/no/such/file\.py: No such file",
        ),
        ("no_such_package:mine", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("edgefl.algorithms.baselines.fedavg:mine", r"has no function 'mine'; it defines .*fedavg_update"),
        (":mine", "cannot load algorithm ':mine'"),
        ("nothing", r"no algorithm 'nothing'; there are: .*'path/to/file\.py:factory'"),
    ],
)
def test_a_place_where_there_is_no_algorithm_is_told(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithms.build(name, Users().objective)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("dir/a-b.py:f", {"algorithm.name": "dir/a-b.py:f"}),
        ("../my rules.py:f:lr=0.1", {"algorithm.name": "../my rules.py:f", "algorithm.lr": 0.1}),
        ("/a=1,b.py:f:alpha=2", {"algorithm.name": "/a=1,b.py:f", "algorithm.alpha": 2}),
        ("pack.mod:f:alpha=2", {"algorithm.name": "pack.mod:f", "algorithm.alpha": 2}),
        ("fedavg:lr=0.1", {"algorithm.name": "fedavg", "algorithm.lr": 0.1}),
    ],
)
def test_the_command_line_takes_a_path_module_or_name(text: str, settings: dict[str, object]) -> None:
    assert parse_algorithm(text) == settings
