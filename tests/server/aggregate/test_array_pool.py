"""Memory that is used again: never while anybody holds what lies there, however it is held."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgefl_server.aggregate.accumulator import ArrayPool

Array = npt.NDArray[np.float32]


def place(array: Array) -> int:
    return array.ctypes.data


HOLDERS: dict[str, Callable[[Array], object]] = {
    "itself": lambda array: array,
    "a view": lambda array: array[2:5],
    "a view of a view": lambda array: array[2:].reshape(2, -1)[1].view(np.int32),
    "a memoryview": memoryview,
    "a tensor": lambda array: torch.from_numpy(array[3:]),
    "an array of a tensor": lambda array: torch.from_numpy(array[3:]).numpy(),
}


@pytest.mark.parametrize("how", HOLDERS)
def test_what_is_held_in_any_way_stays_as_it_is(how: str) -> None:
    spare = ArrayPool()
    array = spare.array(8, np.float32)
    array[:] = 1
    first = place(array)
    holder = HOLDERS[how](array)
    del array
    others = [spare.array(8, np.float32) for _ in range(3)]
    for other in others:
        other[:] = 2
    assert first not in [place(other) for other in others]
    assert np.all(np.asarray(holder).view(np.float32) == 1)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    spare = ArrayPool()
    one, two = spare.array(8, np.float32), spare.array(8, np.float32)
    places = {place(one), place(two)}
    for _ in range(3):
        one = spare.array(8, np.float32)[:]  # the one before is held until then
        two = spare.array(8, np.float32)[:]
        places |= {place(one), place(two)}
    assert len(places) == 3, "two in use and one between them"


def test_another_size_has_memory_of_its_own() -> None:
    spare = ArrayPool()
    for size, dtype in ((8, np.float32), (9, np.float32), (4, np.float64), (0, np.float32)):
        array = spare.array(size, dtype)
        assert array.shape == (size,) and array.dtype == dtype and array.flags.writeable
        array[:] = size
        assert (array == size).all()


def test_no_more_than_two_arrays_are_kept() -> None:
    spare = ArrayPool()
    held = [spare.array(8, np.float32) for _ in range(5)]
    assert len({place(each) for each in held}) == 5
    places = [place(each) for each in held]
    del held
    assert {place(spare.array(8, np.float32)) for _ in range(2)} <= set(places[-2:])
