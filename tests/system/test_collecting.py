"""What is built to stay is not walked through again; the search for garbage goes on for all else."""

from __future__ import annotations

import gc
import weakref

import pytest

from edgefl.system.memory import uncollected_objects


class Link:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_later_garbage_is_found() -> None:
    gc.collect()
    try:
        with uncollected_objects():
            assert not gc.isenabled()
            early = weakref.ref(Link())
        late = weakref.ref(Link())
        gc.collect()

        assert gc.isenabled() and gc.get_freeze_count() > 0
        assert early() is not None and late() is None
    finally:
        gc.unfreeze()
        gc.collect()


def test_after_an_error_all_is_searched_as_before() -> None:
    gc.unfreeze()

    with pytest.raises(RuntimeError), uncollected_objects():
        raise RuntimeError

    assert gc.isenabled() and gc.get_freeze_count() == 0
