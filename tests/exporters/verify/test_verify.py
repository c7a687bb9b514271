"""Verification: a graph that disagrees with torch, or that the runtime refuses, never gets out."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import CEILING, FACTOR, RELATIVE, THOROUGH, Run, compare, verify
from edgefl_export.verify.rounding import Array, exactly
from tests.exporters.examples import pointwise, small_net, step_of


def scaled(factor: float) -> Function:
    return pointwise(lambda t: {"update.w": t["state.w"] * factor}, state__w=(64,))


def test_report_holds_the_error_of_each_output() -> None:
    function = scaled(2.0)

    report = verify(function, to_onnx(capture(function)), 7)

    assert (report.function, report.seed, report.set_aside) == ("example", 7, ())
    assert list(report.errors) == ["update.w"] and report.worst < 1e-6


@pytest.mark.parametrize("quick", [True, False])
def test_wrong_result_names_function_output_error_and_tolerance(quick: bool) -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match=r"'update\.w' of function 'example' differs from torch") as caught:
        verify(scaled(3.0), model, 0, quick=quick)

    details = caught.value.details
    assert details["output"] == "update.w"
    assert details["error"] > details["tolerance"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("quick", [True, False])
def test_slightly_wrong_result_is_caught_on_every_example(quick: bool) -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match="differs from torch"):
        verify(scaled(2.001), model, 0, quick=quick)


def kinked(tensors: Tensors) -> Tensors:
    """``record.gate`` is 1.02w where a sum that is zero in exact arithmetic comes out positive, else w."""
    return gated(tensors, 0.02)


def gated(tensors: Tensors, step: float) -> Tensors:
    w = tensors["state.w"]
    gate = (w.sum() - w.double().sum().float() > 0).to(w.dtype)
    return {"record.gate": w + step * gate * w, "update.w": 2 * w}


def other_side(arrays: Mapping[str, Array]) -> list[Array]:
    """Another runtime for ``kinked``, in which each gate is as far from float64 as a gate can be."""
    w = arrays["state.w"]
    exact = exactly(KINKED, {"state.w": torch.from_numpy(w)})["record.gate"].float().numpy()
    return [np.float32(2.02) * w - exact, 2 * w]


KINKED = pointwise(kinked, state__w=(64,))


def test_where_rounding_decides_torchs_own_rounding_is_the_measure() -> None:
    report = compare(KINKED, other_side, 0)

    assert list(report.rounding) == ["record.gate"]
    assert 0.015 < report.errors["record.gate"] < 0.025 and report.errors["update.w"] == 0.0
    assert report.rounding["record.gate"] >= report.errors["record.gate"] / FACTOR
    assert len(report.set_aside) == THOROUGH.attempts - 1


def test_quick_leaves_float64_out_where_nudged_float32_excuses_a_graph() -> None:
    asked = []

    def watched(t: Tensors) -> Tensors:
        asked.append(t["state.w"].dtype)
        return gated(t, 0.02)

    def other_gate(arrays: Mapping[str, Array]) -> list[Array]:
        w = arrays["state.w"]
        torchs = gated({"state.w": torch.from_numpy(w)}, 0.02)["record.gate"].numpy()
        return [np.float32(2.02) * w - torchs, 2 * w]

    report = compare(pointwise(watched, state__w=(64,)), other_gate, 0, quick=True)

    assert list(report.rounding) == ["record.gate"] and report.rounding["record.gate"] > 0.005
    assert set(asked) == {torch.float32}


def test_quick_asks_float64_before_it_refuses() -> None:
    asked = []

    def rough(t: Tensors) -> Tensors:
        """Wrong in float32 by a part in a thousand, whatever nudges its input."""
        w = t["state.w"]
        asked.append(w.dtype)
        return {"update.w": w * (1.001 if w.dtype == torch.float32 else 1.0)}

    report = compare(pointwise(rough, state__w=(64,)), lambda arrays: [arrays["state.w"]], 0, quick=True)

    assert torch.float64 in asked and report.worst < 1e-6 and not report.rounding


@pytest.mark.parametrize("quick", [True, False])
def test_what_torch_itself_gets_wrong_by_far_excuses_nothing(quick: bool) -> None:
    function = pointwise(lambda t: gated(t, 1.0), state__w=(64,))

    def run(arrays: Mapping[str, Array]) -> list[Array]:
        w = arrays["state.w"]
        exact = exactly(function, {"state.w": torch.from_numpy(w)})["record.gate"].float().numpy()
        return [3 * w - exact, 2 * w]

    with pytest.raises(ExportError, match=r"'record\.gate'.*up to 0\.05 is excused") as caught:
        compare(function, run, 0, quick=quick)

    assert caught.value.details["rounding"] > CEILING  # type: ignore[operator]


@pytest.mark.parametrize("quick", [True, False])
def test_a_function_that_draws_its_own_random_numbers_is_not_excused(quick: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(t: Tensors) -> Tensors:
        return {"update.w": t["state.w"] + 1e-3 * torch.rand(64, generator=generator)}

    with pytest.raises(ExportError, match=r"'example' is not deterministic.*role noise"):
        compare(pointwise(noisy, state__w=(64,)), lambda arrays: [arrays["state.w"]], 0, quick=quick)


def test_torch_runs_once_where_no_excuse_is_needed() -> None:
    runs = 0

    def counted(t: Tensors) -> Tensors:
        nonlocal runs
        runs += 1
        return {"update.w": 2 * t["state.w"]}

    compare(pointwise(counted, state__w=(64,)), lambda arrays: [2 * arrays["state.w"]], 0)

    assert runs == 1


def test_an_example_without_a_kink_is_preferred() -> None:
    kink = KINKED.example(0)["state.w"].double().sum().float()

    def switched(t: Tensors) -> Tensors:
        return {"record.gate": (t["state.w"].sum() > kink).to(t["state.w"].dtype) * t["state.w"]}

    def run(arrays: Mapping[str, Array]) -> list[Array]:
        """The wrong side of the first example's kink."""
        w = arrays["state.w"]
        exact = exactly(function, {"state.w": torch.from_numpy(w)})["record.gate"].float().numpy()
        near = abs(float(w.sum(dtype=np.float64)) - float(kink)) < 1e-4
        return [w - exact if near else exact]

    function = pointwise(switched, state__w=(64,))

    report = compare(function, run, 0)

    assert (report.seed, report.set_aside, dict(report.rounding), report.worst) == (1, (0,), {}, 0.0)


def off(*errors: float) -> Run:
    """A graph that doubles, off by so much of the largest entry, example by example, and right after that."""
    left = list(errors)

    def run(arrays: Mapping[str, Array]) -> list[Array]:
        doubled = (2 * arrays["state.w"]).astype(np.float32)
        doubled[0] += (left.pop(0) if left else 0.0) * np.abs(doubled).max()
        return [doubled]

    return run


def test_one_example_a_little_off_is_set_aside_where_all_others_agree() -> None:
    report = compare(scaled(2.0), off(2e-3), 5)

    assert (report.seed, report.set_aside, dict(report.rounding)) == (6, (5, 7), {})
    with pytest.raises(ExportError, match="differs from torch") as caught:
        compare(scaled(2.0), off(2e-3, 0.0, 3e-3), 5)
    assert caught.value.details["relative"] == pytest.approx(2e-3, rel=0.01)


@pytest.mark.parametrize("error", [2 * CEILING, float("nan")])
def test_an_example_far_off_is_never_set_aside(error: float) -> None:
    with pytest.raises(ExportError, match="differs from torch"):
        compare(scaled(2.0), off(error), 5)


def test_a_percent_is_caught_beside_a_rounded_output() -> None:
    def run(arrays: Mapping[str, Array]) -> list[Array]:
        gate, doubled = other_side(arrays)
        return [gate, doubled * np.float32(1.01)]

    with pytest.raises(ExportError, match=r"'update\.w'.*what torch loses by rounding"):
        compare(KINKED, run, 0)


@functools.cache
def network() -> tuple[Function, bytes]:
    step = step_of(small_net(), (3, 8, 8))
    return step, to_onnx(capture(step))


@pytest.mark.sample(1)
@pytest.mark.parametrize("output", [0, 4, 12])
def test_a_gradient_wrong_by_a_percent_is_caught_in_a_model_with_kinks(output: int) -> None:
    step, right = network()
    session = onnxruntime.InferenceSession(right, providers=["CPUExecutionProvider"])

    def run(arrays: Mapping[str, Array]) -> list[Array]:
        found = list(session.run(None, {port.name: arrays[port.name] for port in session.get_inputs()}))
        found[output] = found[output] * np.float32(1.01)
        return found

    assert verify(step, right, 0).worst <= RELATIVE
    with pytest.raises(ExportError, match="differs from torch"):
        compare(step, run, 0)


def test_a_graph_closer_to_float64_than_torch_is_right() -> None:
    """1e4 + w - 1e4 loses most digits in float32."""
    function = pointwise(lambda t: {"update.w": t["state.w"] + 1e4 - 1e4}, state__w=(64,))

    report = compare(function, lambda arrays: [arrays["state.w"]], 0)

    assert report.worst <= 1e-7 and not report.rounding and not report.set_aside


def test_a_float32_function_is_measured_by_its_own_rounding() -> None:
    def insisting(t: Tensors) -> Tensors:
        if t["state.w"].dtype != torch.float32:
            raise TypeError("float32, please")
        return kinked(t)

    def torchs(arrays: Mapping[str, Array]) -> list[Array]:
        return [value.numpy() for value in kinked({"state.w": torch.from_numpy(arrays["state.w"])}).values()]

    function = pointwise(insisting, state__w=(64,))
    assert "record.gate" not in compare(function, torchs, 0).rounding
    with pytest.raises(ExportError, match=r"'update\.w'"):
        compare(function, lambda arrays: [torchs(arrays)[0], np.float32(2.02) * arrays["state.w"]], 0)


def test_nan_is_never_accepted() -> None:
    model = to_onnx(capture(pointwise(lambda t: {"update.w": t["state.w"].sqrt()}, state__w=(64,))))

    with pytest.raises(ExportError, match="differs from torch by nan"):
        verify(pointwise(lambda t: {"update.w": t["state.w"].abs().sqrt()}, state__w=(64,)), model, 0)


def test_an_example_whose_loss_is_no_number_in_torch_is_drawn_again() -> None:
    """A loss of ignored labels alone is a mean over none: NaN."""
    spec = {"batch.0.x": TensorSpec((1, 2)), "batch.0.y": TensorSpec((1,), torch.int64, below=2)}

    def loss(t: Tensors) -> Tensors:
        return {"metric.loss": F.cross_entropy(t["batch.0.x"], t["batch.0.y"], ignore_index=1)}

    function = Function("train", loss, spec)
    model = to_onnx(capture(function))
    ignored = next(seed for seed in range(100) if function.example(seed)["batch.0.y"].item() == 1)

    assert verify(function, model, ignored).worst <= RELATIVE


def test_other_shape_is_told() -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match=r"float32\[64\] in the runtime and float32\[8, 8\] in torch"):
        verify(pointwise(lambda t: {"update.w": t["state.w"].view(8, 8)}, state__w=(64,)), model, 0)


def test_missing_output_is_told() -> None:
    model = to_onnx(capture(scaled(2.0)))

    with pytest.raises(ExportError, match="has 1 outputs"):
        verify(
            pointwise(lambda t: {"update.w": t["state.w"], "carry.w": t["state.w"]}, state__w=(64,)), model, 0
        )


def test_damaged_bytes_are_told() -> None:
    with pytest.raises(ExportError, match=r"onnxruntime .* cannot load the graph of function 'example'"):
        verify(scaled(2.0), b"not a model", 0)


def test_the_worst_of_several_wrong_outputs_is_told() -> None:
    def outputs(first: float, second: float) -> Function:
        return pointwise(
            lambda t: {"update.w": t["state.w"] * first, "carry.w": t["state.w"] * second}, state__w=(64,)
        )

    model = to_onnx(capture(outputs(1.01, 1.5)))

    with pytest.raises(ExportError, match=r"'update\.w'") as caught:
        verify(outputs(1.0, 1.0), model, 0)

    assert caught.value.details["worst"] == pytest.approx(0.5, rel=1e-3)


def test_a_graph_in_any_runtime_can_be_compared() -> None:
    function = scaled(2.0)

    assert compare(function, lambda arrays: [arrays["state.w"] * np.float32(2)], 0).worst == 0.0
    with pytest.raises(ExportError, match="differs from torch"):
        compare(function, lambda arrays: [arrays["state.w"] * np.float32(3)], 0)
