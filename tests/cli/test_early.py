"""Mistakes on a command line that are told before torch is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_RUN = """
import contextlib, io, json, sys
from edgefl.cli import main
found = []
for words in json.load(sys.stdin):
    sys.argv, errors, code = ["edgefl", *words.split()], io.StringIO(), 0
    with contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found.append([code, errors.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""

WRONG = {
    "run --program sdg": (2, "did you mean 'sgd'?"),
    "run --codec fedpac": (2, "did you mean 'fedpaq'?"),
    "run --loss hubr": (2, "did you mean 'huber'?"),
    "run --tiers strong,half=widht:1/4": (2, "did you mean 'width'?"),
    "run --agents pyton:2": (2, "kinds are python, cpp, web"),
    "run --broker mosquito": (2, "did you mean 'mosquitto'?"),
    "run --data elsewhere": (3, "data.dir: there is no file or folder"),
    "run federation.toml --codec fedpac": (2, "\nthe command line cannot be used:\n  - codec.name"),
    "run federation.toml --rounds 2": (2, "federation.toml cannot be used:\n  - program.name"),
    "simulate --set round.fractoin=0.1": (2, "did you mean 'fraction'?"),
    "simulate --set program.name=fedprx": (2, "did you mean 'fedprox'?"),
    "plan --model resnet9": (2, "did you mean 'resnet"),
    "export --model mpl": (2, "did you mean 'mlp'?"),
    "check mpl": (2, "did you mean 'mlp'?"),
    "check mlp --option clases=3": (2, "did you mean 'classes'?"),
    "profile resnet9": (2, "did you mean 'resnet"),
    "profile federaton.toml": (2, "did you mean 'federation.toml'?"),
    "check mymodl.py:make": (2, "there is no file mymodl.py; did you mean 'mymodel.py'?"),
    "check file.npz:make": (2, "file.npz is no file of Python code"),
    "run wide.toml": (2, "wide.toml is not valid TOML: it is no text in UTF-8"),
    "check mlp --data cifar11": (2, "did you mean 'cifar10'?"),
    "check mlp --data fil.npz": (3, "did you mean 'file.npz'?"),
    "deploy --weights file.npy": (3, "did you mean 'file.npz'?"),
    "deploy --weights file.npz --kind widht": (2, "did you mean 'width'?"),
    "deploy --weights file.npz --kind width --option gama=1": (2, "options.gama: "),
    "heterogeneity nothing": (3, "there is no file or folder nothing"),
    "heterogeneity federaton.toml": (2, "did you mean 'federation.toml'?"),
    "personalize nothing": (3, "there is no file or folder nothing"),
    "replay nofolder": (3, "there is no file or folder nofolder"),
    "replay folder": (2, "there is no folder/run.toml"),
    "replay folder --config none.toml": (2, "there is no federation file none.toml"),
    "replay folder --config empty.toml": (2, "folder is not the folder of a run: it has no journal.sqlite"),
    "run --tiers strong=1,weka:1/4": (2, "no tier '1'"),
    "run --tiers one=strong,weka:1/4": (2, "no tier 'weka'"),
    "run --tiers one=strong:1/4": (2, "no tier 'strong' with a size"),
    "run --tiers half=width:x": (2, "the size of width is a share"),
    "run --tiers strong,strong=weak": (2, "two tiers are called 'strong'"),
    "run --agents pyhton=2": (2, "kinds are python, cpp, web"),
    "run --agents pyhton:2": (2, "did you mean 'python'?"),
    "data spread none.toml": (2, "there is no federation file none.toml"),
    "verify some.efl none.toml": (2, "there is no federation file none.toml"),
    "run none.toml": (2, "there is no federation file none.toml"),
    "run folder": (2, "the federation file folder cannot be read: Is a directory"),
    "acl --out /dev/null/x": (11, "/dev/null/x cannot be used: Not a directory; make room"),
    "acl --out file.npz": (11, "file.npz cannot be used: Not a directory"),
    "run --out file.npz/x": (11, "file.npz/x cannot be used: Not a directory"),
    "export --out file.npz": (11, "file.npz cannot be used: Not a directory"),
    "deploy --weights file.npz --out folder": (11, "folder cannot be used: Is a directory"),
    "heterogeneity --html folder": (11, "folder cannot be used: Is a directory"),
    "data spread --csv /proc/x.csv": (11, "/proc/x.csv cannot be used"),
}


def _tried(folder: Path, rows: list[str]) -> list[tuple[int, str, bool]]:
    """Return exit code, errors and whether torch was loaded of each command line, all in one process."""
    command = [sys.executable, "-P", "-c", _RUN]
    ran = subprocess.run(
        command, input=json.dumps(rows), capture_output=True, text=True, check=True, cwd=folder
    )
    found: list[Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    folder = tmp_path_factory.mktemp("early")
    (folder / "folder").mkdir()
    (folder / "file.npz").touch()
    (folder / "empty.toml").touch()
    (folder / "mymodel.py").touch()
    (folder / "wide.toml").write_text("a = 1", "utf-16")
    (folder / "federation.toml").write_text('[program]\nname = "sdg"\n')
    return dict(zip(WRONG, _tried(folder, list(WRONG)), strict=True))


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_before_torch_is_loaded(
    ended: dict[str, tuple[int, str, bool]], words: str
) -> None:
    code, text = WRONG[words]

    assert text in ended[words][1]
    assert (ended[words][0], ended[words][2]) == (code, False)


def test_a_server_tells_a_wrong_file(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "edgefl", "server", "--out", "x", "--config", "none.toml"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (ran.returncode, "there is no federation file none.toml" in ran.stderr) == (2, True)
