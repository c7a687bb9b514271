"""Verification: a graph that disagrees with torch, or that the runtime refuses, never gets out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed
from edgefl.objective.objective import Objective
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import CEILING, FACTOR, RELATIVE, THOROUGH, Run, compare, verify
from edgefl_export.verify.rounding import NUDGE, PROBES, Array, ReferenceResults, nudge, run_in_double
from tests.exporters.examples import pointwise, small_net, step_of
from tests.support.errors import ExportError, refuses


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
    exact = run_in_double(KINKED, {"state.w": torch.from_numpy(w)})["record.gate"].float().numpy()
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
        exact = run_in_double(function, {"state.w": torch.from_numpy(w)})["record.gate"].float().numpy()
        return [3 * w - exact, 2 * w]

    with refuses(
        ExportError, function="example", output="record.gate", relative=1.0, rounding=..., worst=1.0
    ) as caught:
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
        exact = run_in_double(function, {"state.w": torch.from_numpy(w)})["record.gate"].float().numpy()
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


# -- codes of floats that lie on a threshold ---------------------------------------------------------------


SIZE = 10_000
CODES = Function(
    "codes",
    lambda given: {"update.codes": torch.floor(given["weights.x"] * 2**14).remainder(2).to(torch.uint8)},
    {"weights.x": TensorSpec((SIZE,))},
)


def flipping(count: int) -> Run:
    """A runtime that gives so many other codes than torch."""

    def run(arrays: Mapping[str, Array]) -> Sequence[Array]:
        found = (
            CODES({"weights.x": torch.from_numpy(np.asarray(arrays["weights.x"]))})["update.codes"]
            .numpy()
            .copy()
        )
        found[:count] ^= 1
        return [found]

    return run


def test_codes_that_rounding_excuses_are_told_with_how_far_torch_strays() -> None:
    report = compare(CODES, flipping(3), seed=1)
    assert report.errors == {"update.codes": 3 / SIZE}
    assert 1.5 / SIZE <= report.rounding["update.codes"] <= CEILING
    assert report.set_aside, "other examples were tried for one that does without"


def test_codes_that_agree_need_no_excuse() -> None:
    report = compare(CODES, flipping(0), seed=1)
    assert report.errors == {"update.codes": 0.0} and not report.rounding and not report.set_aside


def test_more_codes_than_rounding_moves_are_refused() -> None:
    with pytest.raises(ExportError, match="2000 whole numbers differ"):
        compare(CODES, flipping(2000), seed=1)


# -- samples of several magnitudes show what usual samples hide --------------------------------------------


FLOATS, WHOLE = TensorSpec((8, 4)), TensorSpec((8, 4), torch.int64)


def function(fn: Callable[[Tensor], Tensor], spec: TensorSpec) -> Function:
    return Function("example", lambda t: {"metric.y": fn(t["batch.0.x"])}, {"batch.0.x": spec})


def verified(
    right: Callable[[Tensor], Tensor], exported: Callable[[Tensor], Tensor], spec: TensorSpec
) -> None:
    verify(function(right, spec), to_onnx(capture(function(exported, spec))), 3)


def test_an_overflow_at_a_wide_spread_is_seen() -> None:
    with refuses(ExportError, function="example", output="metric.y", error=..., tolerance=...):
        verified(lambda x: x.logcumsumexp(1), lambda x: x.exp().cumsum(1).log(), FLOATS)


def test_the_sign_of_a_negative_remainder_is_seen() -> None:
    with refuses(ExportError, function="example", output="metric.y", error=12.0, tolerance=0.0):
        verified(lambda x: x % 3, lambda x: torch.fmod(x, 3), WHOLE)


def test_whole_numbers_beyond_those_of_float32_are_seen() -> None:
    with refuses(ExportError, function="example", output="metric.y", error=9.0, tolerance=0.0):
        verified(lambda x: x // 7, lambda x: (x / 7).floor().long(), WHOLE)


def test_positions_keep_their_usual_draw() -> None:
    table = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))

    verified(lambda x: torch.nn.functional.embedding(x, table), lambda x: table[x], WHOLE)


def test_labels_and_tokens_have_no_wide_example() -> None:
    assert function(lambda x: x, TensorSpec((8,), torch.int64, below=5)).wide_example(0) is None


def test_a_wide_example_has_rows_of_several_magnitudes() -> None:
    floats = function(lambda x: x, FLOATS).wide_example(0)
    whole = function(lambda x: x, WHOLE).wide_example(0)

    assert floats is not None and whole is not None
    sizes = floats["batch.0.x"].abs().mean(1)
    assert sizes.max() > 20 and sizes.min() < 0.5
    assert whole["batch.0.x"].min() < -1000 and whole["batch.0.x"].max() > 2**24


# -- the float64 run ---------------------------------------------------------------------------------------


THIRD = torch.full((4, 4), 1 / 3, dtype=torch.float64)
CONSTANT = torch.full((4, 4), 3.0)
LAYER = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w / 3,
        lambda w: w.float() / 3,
        lambda w: w.to(torch.float32) / 3,
        lambda w: w.type(torch.float32) / 3,
        lambda w: w / CONSTANT,
        lambda w: w @ torch.eye(4) / 3,
        lambda w: torch.full((4, 4), 1.0, dtype=torch.float32) * w / 3,
        lambda w: w / torch.tensor(3.0),
        lambda w: w * (torch.ones(4, 4, dtype=torch.int64) / 3),
        lambda w: w * torch.full((4, 4), 1 / 3),
        torch.func.grad(lambda x: (x * x / 6).sum()),
        lambda w: torch.func.functional_call(LAYER, {"weight": torch.eye(4) / 3}, (w,)),
    ],
)
def test_float64_reaches_every_operation(fn: Callable[[Tensor], Tensor]) -> None:
    function = pointwise(lambda t: {"update.w": fn(t["state.w"])}, state__w=(4, 4))

    found = run_in_double(function, {"state.w": torch.ones(4, 4)})["update.w"]

    torch.testing.assert_close(found, THIRD, rtol=1e-14, atol=0.0)


def test_other_threads_keep_the_default_type() -> None:
    def seen(t: Tensors) -> Tensors:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: torch.zeros(1).dtype).result() == torch.float32
        return {"update.w": t["state.w"]}

    run_in_double(pointwise(seen, state__w=(2,)), {"state.w": torch.zeros(2)})


def test_a_training_step_runs_in_float64_and_integers_stay() -> None:
    step = step_of(small_net(), (3, 8, 8))
    example = step.example(0)

    found = run_in_double(step, example)

    assert {value.dtype for value in found.values()} == {torch.float64}
    assert example["batch.0.y"].dtype == torch.int64 and example["batch.0.x"].dtype == torch.float32
    for name, value in step(example).items():
        np.testing.assert_allclose(value.detach().numpy(), found[name].detach().numpy(), rtol=1e-3, atol=1e-5)


def test_nudged_examples_differ_by_rounding_and_only_in_floats() -> None:
    example = {"x": torch.randn(1000), "y": torch.arange(5)}

    first, second = nudge(example, 1), nudge(example, 2)

    moved = (first["x"] / example["x"] - 1).abs()
    assert 0.5 * NUDGE < moved.max() <= 1.2 * NUDGE and torch.equal(first["y"], example["y"])
    assert not torch.equal(first["x"], second["x"]) and torch.equal(first["x"], nudge(example, 1)["x"])


def test_the_yardstick_of_a_smooth_function_is_tiny() -> None:
    function = pointwise(lambda t: {"update.w": 2 * t["state.w"]}, state__w=(64,))

    strays = list(ReferenceResults(function, function.example(0)).strays("update.w"))

    assert len(strays) == PROBES + 1 and strays == sorted(strays)
    assert strays[0] < 1e-7 and strays[-1] < 2e-6


# -- graphs are compared on weights and buffers that the model can have ------------------------------------


class Scaled(nn.Module):
    """Buffers and parameters of which roots and logarithms are taken."""

    spread: Tensor
    prior: Tensor
    centre: Tensor
    width: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head, self.norm = nn.Linear(6, 5), nn.Linear(5, 3), nn.BatchNorm1d(5)
        self.register_buffer("spread", torch.full((6,), 4.0))
        self.register_buffer("prior", torch.tensor([0.2, 0.3, 0.5]))
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("width", torch.full((5,), 2.0))
        self.temperature = nn.Parameter(torch.full((3,), 0.5))
        self.gain = nn.Parameter(torch.full((5,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.hidden(x / self.spread.sqrt()))
        h = F.batch_norm(h, self.centre.clone(), self.width.clone(), None, None, False)
        scores: Tensor = self.head(F.relu(h * self.gain))
        return scores * self.temperature.log() + self.prior.log()


def drawn(seed: int) -> tuple[Scaled, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Scaled()
    objective = Objective(nn.Sequential(module), TensorSpec((6,)))
    ports = prefixed("weights", objective.weights)
    example = Function("evaluate", lambda t: t, ports).example(seed)
    return module, {name.removeprefix("weights.0."): value for name, value in example.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ("onnx", "executorch"))
def test_roots_and_logarithms_of_buffers_are_no_fault(target: Literal["onnx", "executorch"]) -> None:
    bundle = edgefl.compile(
        edgefl.Model(Scaled(), sample=(6,), classes=3), options=edgefl.CompileOptions(target=target)
    )

    assert bundle.manifest.graphs


def test_buffers_are_as_they_are() -> None:
    module, example = drawn(1)

    for name in ("spread", "prior", "centre", "width"):
        assert torch.equal(example[name], module.get_buffer(name))


def test_statistics_of_batch_norm_move_and_stay_positive() -> None:
    module, example = drawn(1)

    state = module.state_dict()
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(example[name], state[name])
    assert example["norm.running_var"].min() > 0


def test_parameters_are_near_their_values_and_none_is_zero_or_tiny() -> None:
    module, example = drawn(1)

    weight = module.hidden.weight.detach()
    assert 0 < (example["hidden.weight"] - weight).abs().max() < weight.abs().max()
    assert example["temperature"].min() > 0
    assert example["gain"].abs().mean() > 0.01 and example["gain"].min() > 0


def test_a_parameter_of_zeros_gets_values() -> None:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    ports = prefixed("weights", Objective(nn.Sequential(layer), TensorSpec((4,))).weights)

    assert Function("evaluate", lambda t: t, ports).example(0)["weights.0.weight"].abs().min() > 0


def test_ports_share_the_models_memory() -> None:
    layer = nn.Linear(4, 3)
    values = Objective(nn.Sequential(layer), TensorSpec((4,))).weights["0.weight"].values

    assert values is not None and values.data_ptr() == layer.weight.data_ptr()
    assert TensorSpec.holding(layer.weight) == TensorSpec.of(layer.weight)
    assert hash(TensorSpec.holding(layer.weight)) == hash(TensorSpec.of(layer.weight))
