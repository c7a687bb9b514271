"""One process at a time in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl.system.files import FolderHeld, FolderLock

_HOLDER = """
import sys, time
from pathlib import Path
from edgefl.system.files import FolderLock
lock = FolderLock(Path(sys.argv[1]), "serve.lock")
print("held", flush=True)
time.sleep(60)
"""


def test_the_holder_of_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderHeld) as refusal:
        FolderLock(tmp_path, patience_s=0.15)
    assert capsys.readouterr().err == f"waiting up to 0.15 s for {tmp_path}: process {os.getpid()} has it\n"
    assert refusal.value.pid == os.getpid()
    assert refusal.value.who == f"process {os.getpid()}"
    lock.release()
    FolderLock(tmp_path).release()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderHeld) as refusal:
            FolderLock(tmp_path, "serve.lock")
        assert refusal.value.pid == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    FolderLock(tmp_path, "serve.lock").release()


def test_locks_of_other_names_do_not_meet(tmp_path: Path) -> None:
    run, server = FolderLock(tmp_path, "run.lock"), FolderLock(tmp_path, "serve.lock")
    run.release()
    server.release()


def test_a_lock_without_a_number_is_another_process(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / "lock").write_bytes(b"")
    with pytest.raises(FolderHeld) as refusal:
        FolderLock(tmp_path)
    assert refusal.value.who == "another process"
    lock.release()
