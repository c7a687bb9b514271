"""Letting go of a library's code: what may be dropped, and that what is needed again comes back."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from device_runtime import memory
from device_runtime.memory import _unchanged, release_code

MAPPINGS = """\
7f0000000000-7f0000010000 r-xp 00001000 08:01 42      /lib/a.so
Rss:                  64 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
Swap:                  0 kB
7f0000010000-7f0000020000 r--p 00011000 08:01 42      /lib/a.so
Rss:                  16 kB
Private_Dirty:         4 kB
Anonymous:             4 kB
Swap:                  0 kB
7f0000020000-7f0000030000 rw-p 00021000 08:01 42      /lib/a.so
Rss:                   8 kB
Private_Dirty:         0 kB
7f0000030000-7f0000040000 r--p 00031000 08:01 42      /lib/a.so
Rss:                   4 kB
Private_Dirty:         0 kB
Swap:                  4 kB
7f0000040000-7f0000050000 r-xp 00001000 08:01 43      /lib/b.so
Rss:                  12 kB
7f0000050000-7f0000060000 rw-p 00000000 00:00 0
Rss:                  12 kB
"""


def test_only_mappings_of_which_no_page_was_written_are_let_go() -> None:
    assert list(_unchanged(MAPPINGS.splitlines(), "b.so")) == [(0x7F0000000000, 0x7F0000010000, 64 * 1024)]


def test_the_last_mapping_of_the_list_counts_too() -> None:
    listed = MAPPINGS.rpartition("7f0000050000-")[0].splitlines()

    assert list(_unchanged(listed, "a.so")) == [(0x7F0000040000, 0x7F0000050000, 12 * 1024)]


def test_what_is_no_file_is_kept() -> None:
    listed = ["7f0000000000-7f0000010000 r-xp 00000000 00:00 0      [vdso]", "Rss:                  64 kB"]

    assert list(_unchanged(listed, "")) == []


def test_what_is_to_be_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smaps").write_text(MAPPINGS)
    monkeypatch.setattr(memory, "_MAPPINGS", tmp_path / "smaps")

    assert release_code(keep="/lib/") == 0


def test_files_without_code_stay_as_they_are() -> None:
    """Another thread may take them away meanwhile, and have something else at their address."""
    data = "7f0000000000-7f0000010000 r--s 00000000 08:01 42      /data/x.npy\nRss:     64 kB\nPrivate_Dirty:   0 kB\n"

    assert list(_unchanged(data.splitlines(keepends=True), keep="")) == []
    assert list(_unchanged(data.replace("r--s", "r-xp").splitlines(keepends=True), keep="")) != []


def test_what_is_let_go_is_counted_and_comes_back_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code.so").write_bytes(b"code" * mmap.PAGESIZE)
    with (
        (tmp_path / "code.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as code,
    ):
        start = np.frombuffer(code, np.uint8).ctypes.data
        listed = f"{start:x}-{start + len(code):x} r-xp 0 08:01 42 {tmp_path}/code.so\nRss: 12 kB\n"
        (tmp_path / "smaps").write_text(listed)
        monkeypatch.setattr(memory, "_MAPPINGS", tmp_path / "smaps")

        released = release_code()

        assert released == (12 * 1024 if hasattr(mmap, "MADV_DONTNEED") else 0)
        assert code[:] == b"code" * mmap.PAGESIZE


def test_a_library_works_after_its_code_was_let_go() -> None:
    script = (
        "import numpy as np; from device_runtime.memory import release_code\n"
        "x = np.arange(6.0).reshape(2, 3); release_code()\n"
        "print((x @ x.T).tolist())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )

    assert ended.stdout.strip() == "[[5.0, 14.0], [14.0, 50.0]]"
