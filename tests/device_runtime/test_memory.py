"""Letting go of a library's code: what may be dropped, and that what is needed again comes back."""

from __future__ import annotations

import subprocess
import sys

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
    assert _unchanged(MAPPINGS, "a.so") == [(0x7F0000000000, 0x7F0000010000, 64 * 1024)]


def test_the_last_mapping_of_the_list_counts_too() -> None:
    assert _unchanged(MAPPINGS.rpartition("7f0000050000-")[0], "b.so") == [
        (0x7F0000040000, 0x7F0000050000, 12 * 1024)
    ]


def test_a_library_that_is_not_there_lets_nothing_go() -> None:
    assert release_code("no-such-library") == 0


def test_a_library_works_after_its_code_was_let_go() -> None:
    script = (
        "import sys, numpy as np; from device_runtime.memory import release_code, resident_bytes\n"
        "x = np.arange(6.0).reshape(2, 3); before = resident_bytes()\n"
        "released = release_code('_multiarray_umath'); after = resident_bytes()\n"
        "assert sys.platform != 'linux' or (released > 0 and after < before), (released, before, after)\n"
        "print((x @ x.T).tolist())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )

    assert ended.stdout.strip() == "[[5.0, 14.0], [14.0, 50.0]]"
