"""What a confined process may still do: each attempt is made in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from device_runtime.sandbox.confine import Confinement

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what other systems lack is told, not done")

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, sys, socket, signal
from device_runtime.sandbox.confine import Confinement, confine
missing = confine(Confinement(**json.loads(sys.argv[1])))
def attempt():
{body}
try:
    result = attempt()
except BaseException as error:
    result = type(error).__name__
print(json.dumps([result, missing]))
"""


def attempted(body: str, cwd: Path | None = None, **confinement: Any) -> tuple[Any, list[str]]:
    """What the attempt gives, or the name of its error; and what the system does not confine."""
    script = SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(confinement)],
        capture_output=True,
        text=True,
        check=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *([cwd] if cwd else []))))},
    )
    result, missing = json.loads(done.stdout)
    return result, missing


def unless_missing(missing: list[str], what: str) -> None:
    if any(what in each for each in missing):
        pytest.skip(f"not on this machine: {missing}")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "body",
    [
        "return socket.socket(socket.AF_INET, socket.SOCK_STREAM) and 1",
        "return socket.socket(socket.AF_INET, socket.SOCK_DGRAM) and 1",
        "return socket.socketpair() and 1",
        "return os.execv('/bin/true', ['true'])",
        "return os.posix_spawn('/bin/true', ['true'], {})",
        "return os.fork() or os._exit(0)",
        "return os.kill(os.getppid(), 0)",
    ],
)
def test_it_reaches_no_network_no_program_and_no_process(body: str) -> None:
    result, missing = attempted(body)
    unless_missing(missing, "seccomp")
    assert result == "PermissionError"


def test_it_reads_libraries_and_writes_one_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (tmp_path / "pages").mkdir()
    writable = str(tmp_path / "pages")
    result, missing = attempted(f"return open({str(tmp_path / 'secret')!r}).read()", writable=writable)
    unless_missing(missing, "Landlock")
    assert result == "PermissionError"
    for target, expected in ((tmp_path / "other", "PermissionError"), (tmp_path / "pages" / "page", 3)):
        body = f"return open({str(target)!r}, 'w').write('abc')"
        assert attempted(body, writable=writable)[0] == expected
    body = f"import tempfile\nreturn tempfile.TemporaryFile(dir={writable!r}).write(b'abc')"
    assert attempted(body, writable=writable)[0] == 3
    assert attempted("import zoneinfo, colorsys\nreturn 1", writable=writable)[0] == 1


def test_a_folder_that_modules_are_looked_for_in_is_not_read(tmp_path: Path) -> None:
    """As the one is that an agent is started in, with its data and keys below it."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "secret").write_text("key")
    for name in (str(tmp_path / "below" / "secret"), "below/secret", str(ROOT / "pyproject.toml")):
        result, missing = attempted(f"return open({name!r}).read()", cwd=tmp_path)
        unless_missing(missing, "Landlock")
        assert result == "PermissionError"
    body = "import numpy, onnxruntime, edgefl.wire.limits, device_runtime.engine.onnx\nreturn 1"
    assert attempted(body, cwd=tmp_path)[0] == 1


def test_memory_files_and_core_dumps_are_bounded(tmp_path: Path) -> None:
    assert attempted("return len(bytes(1 << 30))", memory_bytes=1 << 29)[0] == "MemoryError"
    body = f"f = open({str(tmp_path / 'large')!r}, 'wb')\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    body += "f.write(bytes(1 << 20))\nf.flush()"
    assert attempted(body, file_bytes=1 << 16, writable=str(tmp_path))[0] == "OSError"
    body = "import resource\nreturn resource.getrlimit(resource.RLIMIT_CORE)[0]"
    assert attempted(body)[0] == 0


def test_threads_and_numpy_still_work() -> None:
    body = "import threading, numpy as np\n"
    body += (
        "t = threading.Thread(target=lambda: None)\nt.start()\nt.join()\nreturn int(np.ones(3) @ np.ones(3))"
    )
    assert attempted(body)[0] == 3


def test_what_is_confined_is_plain_data() -> None:
    assert Confinement() == Confinement(memory_bytes=0, file_bytes=0, cpu_s=0, writable="", readable=())
