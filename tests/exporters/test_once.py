"""What libraries are spared during an export: put back afterwards, and without effect on what is exported."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from edgefl.programs.contract import Function, Tensors, TensorSpec
from exporters.capture import capture
from exporters.once import Change, changed
from exporters.onnx import to_onnx

ROWS = TensorSpec((3, 4))


def test_changes_last_as_long_as_the_context_also_when_it_fails() -> None:
    place = types.SimpleNamespace(name="theirs")

    with pytest.raises(KeyError), changed(Change(place, "name", "ours")):
        assert place.name == "ours"
        raise KeyError

    assert place.name == "theirs"


def test_what_a_library_has_moved_is_left_alone() -> None:
    place = types.SimpleNamespace()

    with changed(Change(place, "name", "ours"), Change(None, "other", 1)):
        assert not vars(place)

    assert not vars(place)


def test_methods_of_classes_are_put_back_as_they_were() -> None:
    class Place:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    with changed(Change(Place, "name", staticmethod(lambda: "ours"))):
        assert Place.name() == "ours"

    assert Place.name() == "Place"


def test_threads_that_change_the_same_leave_it_as_it_was() -> None:
    place = types.SimpleNamespace(name="theirs")
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with changed(Change(place, "name", "first")):
            inside.set()
            go_on.wait()

    def second() -> None:
        with changed(Change(place, "name", "second")):
            assert place.name == "second"

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    assert place.name == "first"
    go_on.set()
    for thread in threads:
        thread.join()

    assert place.name == "theirs"


def test_ops_that_are_registered_after_the_first_export_decompose_too() -> None:
    capture(
        Function("before", lambda tensors: {"metric.loss": tensors["batch.0.x"].sum()}, {"batch.0.x": ROWS})
    )
    library = torch.library.Library("edgefl_test_once", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

    def fn(tensors: Tensors) -> Tensors:
        return {"metric.loss": torch.ops.edgefl_test_once.twice(tensors["batch.0.x"]).sum()}

    captured = capture(Function("after", fn, {"batch.0.x": ROWS}))

    x = torch.arange(12.0).reshape(3, 4)
    assert captured({"batch.0.x": x})["metric.loss"] == 2 * x.sum()
    assert b"Add" in to_onnx(captured)
