"""What decides whether a run goes on: the settings that have a say in the weights, and the code that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.config import parse
from edgefl.setup.runs import run_digest
from tests.server.test_compose import federation


def test_only_keys_with_a_say_in_the_weights_decide_whether_a_run_goes_on() -> None:
    digest = run_digest(federation())
    assert digest == run_digest(federation(broker={"port": 7}, limits={"chunk_bytes": 4096}))
    assert digest == run_digest(federation(downlink={"compression": "none"}))
    assert digest == run_digest(federation(tracking={"tensorboard": True, "mlflow": "http://mlflow.lan"}))
    assert digest != run_digest(federation(downlink={"encoding": "int8"}))
    assert digest != run_digest(federation(algorithm={"lr": 0.3}))
    assert digest != run_digest(federation(federation={"rounds": 11}))


def test_a_key_that_is_added_with_its_default_leaves_a_run_as_it_is() -> None:
    digest = run_digest(federation())
    assert digest == run_digest(federation(downlink={"encoding": "float32"}, aggregate={"rule": "mean"}))
    bare = parse({"model": {"name": "mlp"}}, source="the test")
    assert run_digest(bare) == run_digest(parse({"model": {"name": "mlp"}, "round": {}}, source="the test"))


def test_changed_source_is_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "own_model_for_digests.py"
    source.write_text("def make(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = federation(model={"name": "own_model_for_digests:make", "options": {}})

    before = run_digest(own)
    assert before == run_digest(own)
    source.write_text("def make(): return 1\n")
    changed = run_digest(own)
    monkeypatch.setattr("edgefl.setup.runs.version", lambda: "999")
    assert len({before, changed, run_digest(own)}) == 3


def test_a_run_goes_on_under_another_patch_of_the_same_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def under(version: str) -> str:
        monkeypatch.setattr("edgefl.setup.runs.version", lambda: version)
        return run_digest(federation())

    assert under("1.2.3") == under("1.2.10")
    assert len({under("1.2.3"), under("1.3.3"), under("2.2.3"), under("1.2.4rc1"), under("unknown")}) == 5


@pytest.mark.parametrize("form", ["module", "file"])
def test_a_changed_algorithm_is_named(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "own_algorithm_for_digests.py"
    source.write_text("def make(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = federation(algorithm={"name": f"{source if form == 'file' else source.stem}:make"})

    before = run_digest(named)
    assert before == run_digest(named)
    source.write_text("def make(): return 1\n")
    assert before != run_digest(named)
