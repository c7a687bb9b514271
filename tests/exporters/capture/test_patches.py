"""What libraries are spared during an export: put back afterwards, and without effect on what is exported."""

from __future__ import annotations

import contextlib
import threading
import types

import pytest
import torch

import edgefl_export.onnx.model
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.patches import Patch, patched
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx

ROWS = TensorSpec((3, 4))


def test_changes_last_as_long_as_the_context_also_when_it_fails() -> None:
    place = types.SimpleNamespace(name="theirs")

    with pytest.raises(KeyError), patched(Patch(place, "name", "ours")):
        assert place.name == "ours"
        raise KeyError

    assert place.name == "theirs"


def test_what_a_library_has_moved_is_left_alone() -> None:
    place = types.SimpleNamespace()

    with patched(Patch(place, "name", "ours"), Patch(None, "other", 1)):
        assert not vars(place)

    assert not vars(place)


def test_methods_of_classes_are_put_back_as_they_were() -> None:
    class Place:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    with patched(Patch(Place, "name", staticmethod(lambda: "ours"))):
        assert Place.name() == "ours"

    assert Place.name() == "Place"


def test_a_thread_that_changes_the_same_waits_for_the_other() -> None:
    place = types.SimpleNamespace(name="theirs")
    inside, leave, entered = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with patched(Patch(place, "name", "first")):
            inside.set()
            leave.wait(60)

    def second() -> None:
        with patched(Patch(place, "name", "second")):
            entered.set()

    threads = [threading.Thread(target=each, daemon=True) for each in (first, second)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    assert not entered.wait(0.3)
    assert place.name == "first"
    leave.set()
    for thread in threads:
        thread.join(60)

    assert entered.is_set() and place.name == "theirs"


@pytest.mark.slow
def test_exports_are_the_same_without_what_they_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one another, and of an op that torch.onnx has to decompose first."""

    def core(tensors: Tensors) -> Tensors:
        return {"metric.loss": (tensors["batch.0.x"] @ tensors["batch.0.x"].T).softmax(1).clamp(0.1).sum()}

    def beyond(tensors: Tensors) -> Tensors:
        return {"metric.loss": torch.special.i0(tensors["batch.0.x"]).sum()}

    functions = [Function(fn.__name__, fn, {"batch.0.x": ROWS}) for fn in (core, beyond, core, beyond)]
    monkeypatch.setattr(
        edgefl_export.onnx.model._REGISTRY, "from_torchlib", edgefl_export.onnx.model._from_torchlib
    )
    spared = [_exported(function) for function in functions]
    monkeypatch.setattr(edgefl_export.onnx.model, "patched", lambda *_: contextlib.nullcontext())

    assert [_exported(function) for function in functions] == spared


def _exported(function: Function) -> bytes | str:
    try:
        return to_onnx(capture(function))
    except ExportError as error:
        return str(error)


def test_ops_that_are_registered_after_the_first_export_decompose_too() -> None:
    capture(
        Function("before", lambda tensors: {"metric.loss": tensors["batch.0.x"].sum()}, {"batch.0.x": ROWS})
    )
    library = torch.library.Library("edgefl_test_once", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

    def fn(tensors: Tensors) -> Tensors:
        return {"metric.loss": torch.ops.edgefl_test_once.twice(tensors["batch.0.x"]).sum()}

    lowered = capture(Function("after", fn, {"batch.0.x": ROWS}))

    x = torch.arange(12.0).reshape(3, 4)
    assert lowered({"batch.0.x": x})["metric.loss"] == 2 * x.sum()
    assert b"Add" in to_onnx(lowered)
