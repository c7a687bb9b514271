"""Code of libraries: mapped in pieces, let go of, and there again when it is called. Each test has a process of its own:
pieces stay."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl_device.libraries import PIECE_BYTES

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="mappings are told by Linux alone")
HEAD = """
import ctypes, mmap, os, sys
from pathlib import Path
import numpy as np
from numpy.linalg import norm
from edgefl_device import libraries
from edgefl_device.libraries import PIECE_BYTES, cut_code, release_code

def mappings(name):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line and " r-xp " in line]

def there(part):
    with libraries._PAGES.open("rb", 0) as pages:
        return [page for page, flag in enumerate(libraries._flags(part, pages.fileno())) if flag & 128]

def code(name):
    return max((part for part in libraries._parts() if name in part.path), key=lambda part: part.end - part.start)

def works():
    return float(norm(np.arange(5.0)))
"""
NAME = "_multiarray_umath"


def said(script: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + script], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@LINUX
def test_a_page_that_is_read_brings_no_more_than_its_piece() -> None:
    """Before, Linux maps what the cache has of the 64 KiB around it, so that a page brings many."""
    script = f"""
part = code({NAME!r})
wide = -(-part.start // (1 << 16)) * (1 << 16) + (4 << 16)
place = (wide - part.start) // mmap.PAGESIZE
def read():
    libraries._advise(part.start, part.end - part.start, mmap.MADV_DONTNEED)
    ctypes.string_at(wide, 1)
    return [page - place for page in there(part) if 0 <= page - place < (1 << 16) // mmap.PAGESIZE]
before = read()
ctypes.string_at(part.start, part.end - part.start)  # what nobody uses is not cut
cut_code()
print(len(before), read())
"""
    before, _, after = said(script).partition(" ")

    pages = [int(page) for page in after.strip("[]").split(",")]
    assert int(before) >= len(pages) > 0
    assert set(pages) <= set(range(PIECE_BYTES // mmap.PAGESIZE))


@LINUX
def test_large_libraries_are_cut_once_and_work_on() -> None:
    script = f"""
one, made = len(mappings({NAME!r})), cut_code()
many = len(mappings({NAME!r}))
part = code({NAME!r})
pieces = (part.end - part.start) // PIECE_BYTES
print(one == 1, made > pieces > 16, many in range(pieces - 2, pieces + 3), cut_code(), works() == 30 ** 0.5)
"""
    assert said(script) == "True True True 0 True"


@LINUX
def test_code_is_let_go_of_but_for_what_is_to_be_kept_and_comes_back() -> None:
    script = f"""
cut_code()
part, kept = code({NAME!r}), code("libpython" if "libpython" in str(mappings("")) else "libc.so")
before = len(there(part)), len(there(kept))
release_code(keep=os.path.basename(kept.path))
after = len(there(part)), len(there(kept))
print(after[0] < before[0], after[1] >= before[1], works() == 30 ** 0.5)
again = len(there(part))
release_code()
print(len(there(part)) < again, works() == 30 ** 0.5)
"""
    assert said(script).split() == ["True"] * 5


@LINUX
@pytest.mark.parametrize("before", ["", "release_code()"], ids=["at first", "after code was let go of"])
def test_pages_that_were_written_stay_as_they_are(before: str) -> None:
    """As a breakpoint is: the file has the page without it."""
    script = f"""
part = code({NAME!r})
{before}
place = part.end - mmap.PAGESIZE
libc = ctypes.CDLL(None)
protect = lambda rights: libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(mmap.PAGESIZE), rights)
assert protect(mmap.PROT_READ | mmap.PROT_WRITE) == 0
last = ctypes.c_char.from_address(place + mmap.PAGESIZE - 1)
last.value = b"!"
assert protect(mmap.PROT_READ | mmap.PROT_EXEC) == 0
cut_code(); release_code()
print(last.value, part.start in libraries._cut)
"""
    assert said(script) == "b'!' False"


@pytest.mark.slow
@LINUX
def test_threads_that_load_graphs_and_libraries_do_not_wait_for_each_other() -> None:
    """The list of what is loaded has a lock of its own, which nobody may hold who waits for Python's."""
    script = """
import importlib, pkgutil, threading, time, warnings
sys.setswitchinterval(1e-5)
warnings.simplefilter("ignore")
ended = time.monotonic() + 3.0
def graphs():
    while time.monotonic() < ended:
        with libraries.sparing_code():
            pass
def imports():
    folder = next(Path(place) for place in sys.path if place.endswith("lib-dynload"))
    for module in pkgutil.iter_modules([str(folder)]):
        try:
            importlib.import_module(module.name)
        except Exception:
            pass
threads = [threading.Thread(target=each, daemon=True) for each in (graphs, graphs, imports)]
for each in threads:
    each.start()
for each in threads:
    each.join(60.0)
print([each.is_alive() for each in threads], works() == 30 ** 0.5)
sys.stdout.flush()
os._exit(0)
"""
    assert said(script) == "[False, False, False] True"


REFUSED = {
    "the call fails": "libraries._advise = lambda *each: False",
    "no such advice": "del mmap.MADV_DONTDUMP, mmap.MADV_DONTNEED",
    "pages are not told": "libraries._PAGES = Path('/nowhere')",
    "nor what is loaded": "ctypes.PyDLL = lambda name: object()",
    "nor how many mappings there may be": "libraries._MOST_MAPPINGS = Path('/nowhere')",
    "no room for more mappings": "Path('few').write_text('64'); libraries._MOST_MAPPINGS = Path('few')",
    "pages as large as pieces": "libraries.PIECE_BYTES = mmap.PAGESIZE",
}


@LINUX
@pytest.mark.parametrize("refused", [pytest.param(script, id=name) for name, script in REFUSED.items()])
def test_a_device_works_where_the_system_refuses(refused: str, tmp_path: Path) -> None:
    script = f"""
os.chdir({str(tmp_path)!r})
{refused}
with libraries.sparing_code():
    pass
print(cut_code(), works() == 30 ** 0.5)
"""
    assert said(script) == "0 True"
