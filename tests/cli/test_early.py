"""Mistakes on a command line that are told before torch is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from edgefl.cli.options import writable_file
from tests.support.commands import run_python

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
    "bench train-step": (2, "bench is gone: use `python -m benchmarks`"),
    "run --program=fedavg": (2, "--program is gone: use --algorithm"),
    "run --algorithm sdg": (2, "did you mean 'sgd'?"),
    "run --codec fedpac": (2, "did you mean 'fedpaq'?"),
    "run --loss hubr": (2, "did you mean 'huber'?"),
    "run --tiers strong,half=widht:1/4": (2, "did you mean 'width'?"),
    "run --broker-kind mosquito": (2, "did you mean 'mosquitto'?"),
    "run --data elsewhere": (3, "data.dir: there is no file or folder"),
    "run federation.toml --codec fedpac": (2, "\nthe command line cannot be used:\n  - codec.name"),
    "run federation.toml --rounds 2": (2, "federation.toml cannot be used:\n  - algorithm.name"),
    "simulate --set round.fractoin=0.1": (2, "did you mean 'fraction'?"),
    "simulate --set algorithm.name=fedprx": (2, "did you mean 'fedprox'?"),
    "plan --model resnet9": (2, "did you mean 'resnet"),
    "export --model mpl": (2, "did you mean 'mlp'?"),
    "check mpl": (2, "did you mean 'mlp'?"),
    "check mlp --option clases=3": (2, "did you mean 'classes'?"),
    "profile resnet9": (2, "did you mean 'resnet"),
    "profile federaton.toml": (2, "did you mean 'federation.toml'?"),
    "check mymodl.py:make": (2, "there is no file mymodl.py; did you mean 'mymodel.py'?"),
    "check fil.py:make": (2, "there is no file fil.py; give its path"),
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
    "data spread --csv /proc/x.csv": (
        11,
        "/proc/x.csv cannot be used: No such file or directory; correct the path",
    ),
    "key new /proc/k": (11, "/proc/k cannot be used: No such file or directory; correct the path"),
    "plan": (2, "give a federation file, or --model"),
    "plan --model mlp --memory 32XB": (2, "--memory: '32XB' is not a size"),
    "plan --model mlp --memory -5MiB": (2, "--memory: '-5MiB' is not a size"),
    "plan --model mlp --downlink 1MBs": (2, "--downlink: a link is a rate"),
    "plan --model mlp --compute inf": (2, "--compute is a number from 0 on"),
    "plan --model mlp --kind widht": (2, "did you mean 'width'?"),
    "plan --model mlp --gamma 3": (2, "a gamma is above 0 and at most 1"),
    "plan --model mlp --device-file phone.toml": (2, "phone.toml: memory: '32XB' is not a size"),
    "plan --model code.py:mkae": (2, "code.py has no function 'mkae'; it defines make; did you mean 'make'?"),
    "export --model mlp --tier strog": (2, "did you mean 'strong'?"),
    "export --model vit --tier waek": (2, "did you mean 'weak'?"),
    "export tiers.toml --tier haf": (2, "did you mean 'half'?"),
    "export --model mlp --memory-budget 64XB": (2, "--memory-budget: '64XB' is not a size"),
    "export --model mlp --fit phne.toml": (2, "there is no device file phne.toml"),
    "export --model mlp --fit phone.toml": (2, "phone.toml: memory: '32XB' is not a size"),
    "export --model mlp --fit phone.toml --tier strong": (2, "leave out --tier strong, or --fit"),
    "export --model mlp --outputs planned": (2, "only ExecuTorch programs have planned outputs"),
    "check code.py:mkae": (2, "code.py has no function 'mkae'"),
    "check code.py": (2, "name the factory too, such as code.py:make"),
    "check code.py:make": (2, "found no sample_shape: add --option 'sample_shape="),
    "check syntax.py:make": (2, "syntax.py is no Python code: invalid syntax (line 1)"),
    "check zeros.py:make": (2, "zeros.py is no Python code: "),
    "ls codecs fedbatt": (2, "did you mean 'fedbat'?"),
    "validate limits.toml": (2, "limits.fetch_windw: unknown key; did you mean 'fetch_window'?"),
    "run values.toml": (2, "algorithm.steps: Input should be greater than or equal to 1"),
    "simulate values.toml": (2, "algorithm.lr: Input should be a finite number"),
    "run --out done": (2, "done holds a finished run: use --fresh or another --out"),
    "simulate --out done": (2, "done holds a simulation: --resume continues it"),
    "simulate no_count.toml": (2, "no tier has a count"),
    "run digits.toml": (2, "digits.toml is not valid TOML: a number has thousands of digits"),
    "run deep.toml": (2, "deep.toml is not valid TOML: lists or tables are nested too deeply"),
    "plan --model mlp --device-file digits.toml": (2, "no device file: a number has thousands of digits"),
    "check json:lods": (2, "did you mean 'loads'?"),
    "check mlp --loss code.py:los": (2, "loss.name: code.py has no function 'los'"),
    "run --model code.py:mkae": (2, "did you mean 'make'?"),
    "run --algorithm code.py:mkae": (2, "algorithm.name: code.py has no function 'mkae'"),
    "run --tiers half=width:2": (2, "a share above 0 and at most 1"),
    "profile mlp --tier strog": (2, "did you mean 'strong'?"),
    "deploy --weights file.npz --data nodata": (3, "there is no file or folder nodata"),
    "deploy --weights weights/file.npz --tier haf": (2, "did you mean 'half'?"),
    "heterogeneity folder": (2, "folder is not the folder of a run"),
    "heterogeneity tiers.toml --weights fil.npz": (3, "did you mean 'file.npz'?"),
    "personalize folder": (2, "folder is not the folder of a run"),
    "personalize weights --steps 0,x": (2, "--steps is a list of whole numbers"),
    "simulate --mlflow nourl": (2, "tracking.mlflow: expected a URL such as http://"),
    "run --mlflow http://me:secret@host": (2, "an address without user and password"),
    "run tracked.toml": (2, "simulation.mlflow: it is called 'tracking.mlflow' now"),
    "check mlp --data file.npz": (3, "file.npz is no .npz archive"),
    "check mlp --data table.csv": (3, "table.csv, line 3: column 'a' is 'no', which is no number"),
    "check mlp --data table.csv --label kind": (3, "it has 'a', 'label': let --label name one of these"),
    "check mlp --data folder --label kind": (2, "give the .csv or .jsonl that has it"),
    "check mlp --data folder": (3, "folder is no training data"),
}


def _tried(folder: Path, rows: list[str]) -> list[tuple[int, str, bool]]:
    """Return exit code, errors and whether torch was loaded of each command line, all in one process."""
    ran = run_python("-P", "-c", _RUN, input=json.dumps(rows), check=True, cwd=folder)
    found: list[Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    folder = tmp_path_factory.mktemp("early")
    (folder / "folder").mkdir()
    (folder / "file.npz").touch()
    (folder / "empty.toml").touch()
    (folder / "table.csv").write_text("a,label\n1,x\nno,y\n")
    (folder / "mymodel.py").touch()
    (folder / "code.py").write_text("import sys\n\ndef make():\n    return sys\n")
    (folder / "syntax.py").write_text("def make(:\n")
    (folder / "zeros.py").write_bytes(b"\0\0")
    (folder / "values.toml").write_text("[algorithm]\nsteps = 0\nlr = inf\n")
    (folder / "no_count.toml").write_text("[tiers.a]\n")
    (folder / "done").mkdir()
    for name in ("config.toml", "model.safetensors"):
        (folder / "done" / name).touch()
    (folder / "tracked.toml").write_text('[simulation]\nmlflow = "sqlite:///x"\n')
    (folder / "limits.toml").write_text("[limits]\nfetch_windw = 4\n")
    (folder / "digits.toml").write_text(f"batch = {'1' * 5000}\n")
    (folder / "deep.toml").write_text(f"a = {'[' * 100_000}\n")
    (folder / "phone.toml").write_text('memory = "32XB"\n')
    tiers = '[tiers.strong]\ncut = 0\n[tiers.half]\nkind = "width"\ngamma = 0.5\n'
    (folder / "weights").mkdir()
    (folder / "weights" / "file.npz").touch()
    for name in ("tiers.toml", "weights/run.toml"):
        (folder / name).write_text(tiers)
    (folder / "wide.toml").write_text("a = 1", "utf-16")
    (folder / "federation.toml").write_text('[algorithm]\nname = "sdg"\n')
    return dict(zip(WRONG, _tried(folder, list(WRONG)), strict=True))


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_named_before_torch_loads(ended: dict[str, tuple[int, str, bool]], words: str) -> None:
    code, text = WRONG[words]

    assert text in ended[words][1]
    assert (ended[words][0], ended[words][2]) == (code, False)


def test_a_server_tells_a_wrong_file(tmp_path: Path) -> None:
    ran = run_python("-P", "-m", "edgefl", "server", "--out", "x", "--config", "none.toml", cwd=tmp_path)

    assert (ran.returncode, "there is no federation file none.toml" in ran.stderr) == (2, True)


NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Give up root's rights for a while, if the tests have them."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_device_can_be_written_to_in_a_folder_that_cannot() -> None:
    with ordinary_user():
        assert writable_file(Path(os.devnull)) == Path(os.devnull)


def test_a_read_only_file_in_a_writable_folder_is_refused() -> None:
    with NamedTemporaryFile() as file:
        os.chmod(file.name, 0o444)
        with ordinary_user(), pytest.raises(PermissionError) as refused:
            writable_file(Path(file.name))

    assert refused.value.filename == file.name
