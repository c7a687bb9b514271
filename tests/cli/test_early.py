"""Mistakes on a command line that are told before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import sys
from edgefl.cli import main
sys.argv = ["edgefl", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""

WRONG = {
    "run --program sdg": "did you mean 'sgd'?",
    "run --codec fedpac": "did you mean 'fedpaq'?",
    "run --loss hubr": "did you mean 'huber'?",
    "simulate --set round.fractoin=0.1": "did you mean 'fraction'?",
    "simulate --set program.name=fedprx": "did you mean 'fedprox'?",
    "plan --model resnet9": "did you mean 'resnet",
    "export --model mpl": "did you mean 'mlp'?",
    "run none.toml": "there is no federation file none.toml",
    "server --out x --config none.toml": "there is no federation file none.toml",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_name_is_told_before_torch_is_loaded(tmp_path: Path, words: str) -> None:
    command = [sys.executable, "-c", _RUN, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert WRONG[words] in ran.stderr
    assert ran.stdout.split()[0] == "2"
    if not words.startswith("server"):  # it loads while another process reads the options
        assert ran.stdout.split()[1] == "False"


@pytest.mark.parametrize("place", ["/dev/null/x", "file/x"])
def test_a_place_that_cannot_be_written_ends_with_the_code_of_storage(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", _RUN, "acl", "--out", place]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert f"{place} cannot be used: Not a directory; make room" in ran.stderr
    assert ran.stdout.split()[0] == "11"
