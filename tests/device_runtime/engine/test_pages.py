"""Pages: values of a step that wait in a file without a name."""

from __future__ import annotations

import mmap
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

from edgefl.errors import BundleError, StoreError
from edgefl.wire.bundle.graphs import join, split
from edgefl.wire.bundle.manifest import Port
from edgefl_device.engine.onnx import SMALL_BYTES, PageFile
from tests.silence import frank_environment

LARGE = SMALL_BYTES // 4


def page(number: int, shape: tuple[int, ...]) -> Port:
    return Port(name=f"page.{number}", role="page", dtype="float32", shape=shape)


@pytest.mark.parametrize("entries", [1, LARGE - 1, LARGE, LARGE + 1, LARGE + mmap.PAGESIZE // 4 - 8])
def test_a_value_is_read_as_it_was_written_also_over_an_older_one(tmp_path: Path, entries: int) -> None:
    ports = [page(0, (entries,)), page(1, (2, entries)), page(2, ())]
    pages = PageFile(ports, tmp_path)

    for turn in range(2):
        for port in ports:
            pages.room(port)[...] = np.arange(max(1, port.nbytes // 4)).reshape(port.shape) + turn
        for port in ports:
            expected = np.arange(max(1, port.nbytes // 4), dtype=np.float32).reshape(port.shape) + turn
            np.testing.assert_array_equal(pages.value(port), expected)


def test_a_page_is_padded_and_aligned(tmp_path: Path) -> None:
    for extra in range(0, 20):
        port = page(0, (LARGE + extra,))

        value = PageFile([port], tmp_path).value(port)

        assert value.ctypes.data % 64 == 0
        assert -(value.ctypes.data + value.nbytes) % mmap.PAGESIZE >= 64


def test_nothing_of_it_is_seen_in_the_folder(tmp_path: Path) -> None:
    pages = PageFile([page(0, (LARGE,))], tmp_path)

    pages.room(page(0, (LARGE,)))[...] = 1

    assert pages.nbytes >= SMALL_BYTES
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no room for .* that a training step keeps in .*missing"):
        PageFile([page(0, (LARGE,))], tmp_path / "missing")


def test_segments_travel_as_one_blob() -> None:
    assert split(join([b"one", b"", b"three"])) == [b"one", b"", b"three"]


@pytest.mark.parametrize(
    "data", [b"", b"\x08\x08\x12\x05", join([b"one"])[:-1], join([b"one"]).replace(b"-s", b"-x")]
)
def test_another_blob_is_no_segments(data: bytes) -> None:
    with pytest.raises(BundleError, match="segments"):
        split(data)


# -- no engine tells anybody but the server about this device ----------------------------------------------


SHOWS = """
import {module}, sys
from pathlib import Path
assert "onnxruntime" in sys.modules
print(len([*Path("/proc/self/task").iterdir()]))
"""


def threads_of(module: str, home: Path, **more: str) -> int:
    told = subprocess.run(
        [sys.executable, "-c", SHOWS.format(module=module)],
        env=frank_environment(home, **more),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(told.stdout)


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("module", ["edgefl_device.engine.onnx", "edgefl_export.deploy.export"])
def test_onnxruntime_is_told_to_report_to_nobody_before_it_is_imported(module: str, tmp_path: Path) -> None:
    assert threads_of(module, tmp_path, ORT_DISABLE_TELEMETRY="") == 1, "a thread waits to tell"
    assert not [*tmp_path.rglob("*")], "what is to be told waits in a file"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.skipif(Version(version("onnxruntime")) < Version("1.29"), reason="reports from 1.29 on")
def test_it_would_report_and_whoever_wants_that_may_say_so(tmp_path: Path) -> None:
    assert threads_of("edgefl_device.engine.onnx", tmp_path, ORT_DISABLE_TELEMETRY="0") > 1
    assert [*tmp_path.rglob("onnxruntime.db")]
