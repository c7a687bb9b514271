"""`edgefl device` reads its options in a process apart: what it says and how it ends stay the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgefl.system.lazy_modules import not_here, on_first_use
from tests.pairs import slow
from tests.support.commands import run_python


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "edgefl", "device", *arguments)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--id", "x", "--data", "/nonexistent"), 3, "there is no file or folder /nonexistent"),
        (("--id", "x", "--data", ".", "--broker", "a:b"), 7, "should read host:port"),
        (("--id", "x", "--data", ".", "--limit", "a=b"), 2, "--limit"),
        (("--id", "x", "--data", ".", "--token", "@none"), 2, "there is no file none; give one"),
        (("--id", "x", "--data", ".", "--surroundings-command", "none"), 2, "there is no command 'none'"),
        slow(("--id", "x"), 2, "Missing option"),
    ],
)
def test_what_cannot_be_a_device_is_refused_once(arguments: tuple[str, ...], code: int, said: str) -> None:
    found = called(*arguments)

    assert found.returncode == code
    assert found.stderr.count(said) == 1 and "Traceback" not in found.stderr


def test_help_is_that_of_the_command() -> None:
    found = called("--id", "x", "--help")

    assert found.returncode == 0 and "--until-done" in found.stdout


def test_a_module_is_loaded_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rarely_used.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    on_first_use("rarely_used")
    try:
        import rarely_used  # type: ignore[import-not-found]

        assert "VALUE" not in vars(rarely_used)
        assert rarely_used.VALUE == 7
        assert sys.modules["rarely_used"] is not rarely_used
        with pytest.raises(AttributeError):
            _ = rarely_used.OTHER
    finally:
        sys.modules.pop("rarely_used", None)


def test_a_module_that_does_not_exist_stays_so() -> None:
    on_first_use("there_is_no_such_module")

    assert "there_is_no_such_module" not in sys.modules


def test_a_library_goes_without_a_hidden_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seldom_wanted.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    not_here("seldom_wanted", "json")
    try:
        with pytest.raises(ImportError):
            import seldom_wanted  # type: ignore[import-not-found]  # noqa: F401
        import json

        assert json.loads("7") == 7, "what is there stays"
    finally:
        sys.modules.pop("seldom_wanted", None)
