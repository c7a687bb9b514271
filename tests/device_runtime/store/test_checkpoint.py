"""The training state on disk: whole or not at all, and one tensor in memory at a time."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import StoreError
from edgefl.wire.tensors import Array
from edgefl_device.store.database import Checkpoint, Store
from tests.device_runtime.store.stores import TENSORS, checkpoint, open_store, run_sql, step_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def test_a_checkpoint_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.open_job(b"job")
    store.save_checkpoint("n1", Checkpoint(3, {"loss": 0.5}, TENSORS.items(), "12 rows, carry n0"))

    saved = store.checkpoint("n1")

    assert saved is not None
    assert (saved.step, saved.sums, saved.basis) == (3, {"loss": 0.5}, "12 rows, carry n0")
    store.close()


def test_a_checkpoint_comes_back_with_every_tensor_as_it_was(store: Store) -> None:
    store.save_checkpoint("n1", checkpoint(4))

    kept = store.checkpoint("n1")

    assert kept is not None
    assert (kept.step, kept.sums) == (4, {"loss": 0.1 + 0.2})
    found = dict(kept.tensors)
    assert list(found) == list(TENSORS)
    for name, array in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.writeable


def test_a_tensor_of_many_pages_comes_back_as_it_was(store: Store) -> None:
    large = np.random.default_rng(0).standard_normal(3 * (1 << 18) // 4 + 1).astype(np.float32)
    store.save_checkpoint("n1", checkpoint(1, [("large", large)]))

    kept = store.checkpoint("n1")

    assert kept is not None
    np.testing.assert_array_equal(dict(kept.tensors)["large"], large)


def test_a_checkpoint_belongs_to_its_task(store: Store) -> None:
    store.save_checkpoint("n1", checkpoint(4))

    assert store.checkpoint("n2") is None

    store.save_checkpoint("n2", checkpoint(1))

    assert (step_of(store, "n1"), step_of(store, "n2")) == (None, 1)


def test_a_newer_checkpoint_takes_the_place_of_the_older_whole(store: Store) -> None:
    store.save_checkpoint("n1", checkpoint(3, [("other", np.zeros(2)), ("state.count", np.zeros(5))]))
    store.save_checkpoint("n1", checkpoint(4))

    assert step_of(store) == 4
    assert run_sql(store, "SELECT COUNT(*) FROM checkpoint_tensors") == [(len(TENSORS),)]


def test_a_checkpoint_that_fails_half_way_leaves_the_older_one(store: Store) -> None:
    class Broken(Exception):
        pass

    def half() -> Iterator[tuple[str, Array]]:
        yield "state.weights.w", np.zeros((2, 3), np.float32)
        raise Broken

    store.save_checkpoint("n1", checkpoint(3))
    with pytest.raises(Broken):
        store.save_checkpoint("n1", checkpoint(4, half()))

    assert step_of(store) == 3
    kept = store.checkpoint("n1")
    assert kept is not None
    np.testing.assert_array_equal(dict(kept.tensors)["state.weights.w"], TENSORS["state.weights.w"])


def test_a_process_killed_half_way_leaves_the_older_one(tmp_path: Path) -> None:
    """With more than SQLite's cache holds: half of it is in the file by then."""
    store = open_store(tmp_path)
    store.save_checkpoint("n1", checkpoint(3))
    store.close()
    script = (
        "import os, sys; import numpy as np; from pathlib import Path; from edgefl_device.store.database import *\n"
        "def half():\n"
        "    for index in range(8): yield f't{index}', np.ones(1 << 17)\n"
        "    os.kill(os.getpid(), 9)\n"
        "s = Store(Path(sys.argv[1]), limit_bytes=1000, history_rounds=5)\n"
        "s.save_checkpoint('n1', Checkpoint(4, {}, half()))"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=300)

    again = open_store(tmp_path)

    assert ended.returncode == -9
    assert step_of(again) == 3
    again.close()


def test_a_checkpoint_keeps_no_tensor_alive_that_it_has_written(store: Store) -> None:
    alive: list[int] = []

    def watched() -> Iterator[tuple[str, Array]]:
        written: list[weakref.ref[Array]] = []
        for index in range(4):
            alive.append(sum(ref() is not None for ref in written))
            array = np.zeros(1000)
            written.append(weakref.ref(array))
            yield f"t{index}", array
            del array

    store.save_checkpoint("n1", checkpoint(1, watched()))

    assert alive == [0, 0, 0, 0]


def test_memory_of_a_checkpoint_is_that_of_a_tensor(tmp_path: Path) -> None:
    script = (
        "import sys; import numpy as np; from pathlib import Path; from edgefl_device.store.database import *\n"
        "from edgefl_device.host import *; from benchmarks.repetition import reset_peak\n"
        "return_memory_early(); s = Store(Path(sys.argv[1]), limit_bytes=1000, history_rounds=5)\n"
        "def use(number):\n"
        "    made = ((f't{i}', np.full(1 << 17, i, float)) for i in range(number))\n"
        "    s.save_checkpoint('n1', Checkpoint(4, {}, made))\n"
        "    for name, array in s.checkpoint('n1').tensors: assert name == f't{int(array[-1])}'\n"
        "use(2)  # code of libraries counts too, where it is read for the first time\n"
        "reset_peak(); before = peak_bytes()\n"
        "use(16)\n"
        "print(peak_bytes() - before)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, timeout=300, capture_output=True
    )

    assert int(ended.stdout) < 4 << 20


def test_a_checkpoint_replaced_while_it_is_read_is_an_error(store: Store) -> None:
    store.save_checkpoint("n1", checkpoint(3))
    kept = store.checkpoint("n1")
    assert kept is not None
    reading = iter(kept.tensors)
    next(reading)

    store.save_checkpoint("n1", checkpoint(4))

    with pytest.raises(StoreError, match="cannot be read"):
        next(reading)
