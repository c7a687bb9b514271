"""`python -m benchmarks train-step`: its processes, its baseline, its rows."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.graphs import write_arrays, write_graph
from benchmarks.machine import own_environment
from benchmarks.repetition import StepWorker, WorkerFailed
from benchmarks.torch_layers import check_torch_layers, to_torch_layers
from benchmarks.train_step import baselines, et_training
from benchmarks.train_step.baselines import (
    BaselineResult,
    RaceJob,
    TrainStepSettings,
    loss_error,
    open_baseline,
)
from benchmarks.train_step.command import SGD, compile_step, measure
from benchmarks.train_step.eager import built, channels_last, compiled, optimizer, stepper
from benchmarks.train_step.tuning import take_fastest
from edgefl import algorithms
from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import trainable_copy
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.layers.recurrent import BiLstm, Gru, Lstm
from edgefl.models.losses import (
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    Loss,
    SequenceCrossEntropy,
    SquaredError,
)
from edgefl.models.losses.as_torch import loss_as_torch
from edgefl.models.losses.loss import batch_mean
from edgefl.objective.objective import Objective
from edgefl_export.compiler.compiler import target_of
from edgefl_export.memory.recompute import Budget, beside_tensors, peak_bytes
from tests.support.errors import ConfigError, EdgeflError, ModelError, refuses

FIELDS = [
    *("model", "target", "batch", "threads", "ms", "eager_ms", "ratio", "max_rel_error"),
    *("peak_over_idle_bytes", "eager_peak_over_idle_bytes"),
]
STEPPING = "from benchmarks.repetition import serve; "


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "train-step", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_row_has_what_the_machine_and_people_ask_for() -> None:
    ran = bench("--model", "mlp", "--batch", "4", "--repeat", "1", "--option", "size=8", "--json")

    assert ran.returncode == 0, ran.stderr
    [row] = json.loads(ran.stdout)["results"]
    assert list(row)[: len(FIELDS)] == FIELDS
    assert (row["model"], row["target"], row["batch"], row["threads"]) == ("mlp", "onnx", 4, 1)
    assert 0 < row["ms_min"] <= row["ms"] and 0 < row["eager_ms_min"] <= row["eager_ms"]
    assert row["ratio"] == pytest.approx(row["ms"] / row["eager_ms"], rel=1e-2)
    assert row["max_rel_error"] <= 1e-4 and row["steps"] >= 2
    assert row["peak_over_idle_bytes"] > 0 and row["eager_peak_over_idle_bytes"] > 0
    assert row["idle_bytes"] < row["eager_idle_bytes"] / 2, "the device's process holds torch"
    assert row["model_options"] == {"size": 8} and row["ort_training_ms"] is None
    assert row["et_training_ms"] is None and row["et_training_error"] is None
    assert row["rounding_error"] is None
    assert row["cpu"] and row["variant"] == "default" and row["cpu_ms"] > 0 and row["eager_cpu_ms"] > 0
    assert row["compile_ms"] is None and row["channels_last_error"] is None
    assert "model mlp, ms " in ran.stderr


@pytest.mark.slow
def test_the_fastest_form_is_taken_and_what_fails_is_not(tmp_path: Path) -> None:
    submodel = built("resnet8", {}, "strong")
    function = algorithms.build("sgd", Objective.of(submodel), batch=2, **SGD).phases[0].function
    form = target_of("onnx")
    captured, artifact, _ = compile_step(function, None, form)
    example = function.example(0)
    write_graph(tmp_path, captured, artifact, "onnx")
    write_arrays(tmp_path, captured, function, example, {"lr": 0.01})
    variants = form.variants(captured, artifact, form.verify(function, artifact.model, 1, artifact.in_place))

    name, model = take_fastest(
        tmp_path, artifact.model, variants | {"none": b"no model"}, 1, own_environment()
    )

    assert {*variants} == {"blocked"} and name in ("", "blocked")
    assert model == (tmp_path / "graph.bin").read_bytes() == variants.get(name, artifact.model)


@pytest.mark.slow
def test_an_environment_without_its_package_costs_only_its_columns() -> None:
    python = sys.executable
    settings = TrainStepSettings(
        batch=2, repeat=1, options={"size": 4}, ort_training=python, jax=python, onnxsim=python
    )

    row = measure("mlp", settings)

    assert row.ms > 0 and row.ort_training_ms is None and row.jax_ms is None
    assert row.onnxsim_error == "ModuleNotFoundError: No module named 'onnxsim'"
    assert row.jax_error == "ModuleNotFoundError: No module named 'jax'"
    assert "No module named 'onnxruntime.training'" in str(row.ort_training_error)


@pytest.mark.slow
def test_executorchs_own_training_export_stands_beside_the_step() -> None:
    row = measure("mlp", TrainStepSettings(batch=2, repeat=1, options={"size": 4}, et_training=True))

    assert row.et_training_error is None
    assert 0 < (row.et_training_ms_min or 0) <= (row.et_training_ms or 0)


@pytest.mark.slow
def test_the_training_export_computes_loss_and_gradients(tmp_path: Path) -> None:
    submodel = built("mlp", {"size": 4}, "strong")
    step = algorithms.build("sgd", Objective.of(submodel), batch=2).phases[0].function
    batch = {name: value for name, value in step.example(0).items() if name.startswith("batch.")}
    np.savez(tmp_path / "batch0.npz", **{name: value.numpy() for name, value in batch.items()})  # type: ignore[arg-type]
    module = to_torch_layers(submodel.suffix)
    wanted = loss_as_torch(submodel.spec.loss)(module(batch["batch.0.x"]), batch["batch.0.y"])
    wanted.backward()  # type: ignore[no-untyped-call]

    et_training.prepare(tmp_path, submodel)
    algorithm = et_training.opened(tmp_path)
    (loss,) = algorithm.forward_backward("forward", (batch["batch.0.x"], batch["batch.0.y"]))

    torch.testing.assert_close(loss, wanted.detach())
    found = algorithm.named_gradients()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[f"module.{name}"], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_elementary_ops_is_batch_norm(affine: bool) -> None:
    module = to_torch_layers(nn.Sequential(BatchNorm(3, affine=affine), nn.BatchNorm2d(3).eval()))
    x = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))

    plain = et_training.elementary(copy.deepcopy(module))

    assert [type(part).__name__ for part in plain] == ["PlainBatchNorm", "BatchNorm2d"]
    torch.testing.assert_close(plain(x), module(x))


@pytest.mark.slow
def test_a_training_export_that_fails_is_told_and_ends_nothing(tmp_path: Path) -> None:
    """Here there is no batch to export it for."""
    job = RaceJob("mlp", tmp_path, built("mlp", {"size": 4}, "strong"), TrainStepSettings(), noisy=False)

    with ExitStack() as stack:
        outcome = open_baseline(stack, "et_training", job, eager=StepWorker([]))

    assert outcome.worker is None and str(outcome.problem).startswith("IndexError: ")


@pytest.mark.slow
def test_a_memory_budget_is_compiled_into_the_step() -> None:
    submodel = built("resnet8", {"size": 32, "widths": (8, 8, 8)}, "strong")
    step = algorithms.build("sgd", Objective.of(submodel), batch=32).phases[0].function

    captured, plain, none = compile_step(step, None, target_of("onnx"))
    _, tight, budget = compile_step(step, Budget(0.9, relative=True), target_of("onnx"))

    beside = beside_tensors(captured)
    assert none == 0 and budget == int(0.9 * (peak_bytes(captured) - beside)) + beside
    assert len(tight.nodes) > len(plain.nodes)


@pytest.mark.slow
def test_a_budget_that_is_no_size_is_told() -> None:
    ran = bench("--model", "mlp", "--memory-budget", "much")

    assert ran.returncode == ConfigError.exit_code and "'much' is not a size" in " ".join(ran.stderr.split())


@pytest.mark.slow
def test_an_unknown_model_is_refused_before_the_others_are_measured() -> None:
    ran = bench("--model", "resnet8", "--model", "resnet9", "--json")

    assert ran.returncode == ConfigError.exit_code
    assert "no model 'resnet9'" in " ".join(ran.stderr.split())
    assert ran.stdout == ""


def test_an_unknown_tier_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"no tier 'tiny'.*: strong, moderate, weak"):
        built("resnet8", {}, "tiny")


def test_a_worker_times_each_step_and_sees_the_memory_it_takes() -> None:
    script = "kept = []; serve(lambda: lambda: kept.append(bytearray(b'x' * (32 << 20))))"

    with StepWorker([sys.executable, "-c", STEPPING + script]) as worker:
        worker.run(1, count=False)
        first = worker.peak
        worker.run(3)

    assert len(worker.times) == len(worker.cpu_ms) == 3 and min(worker.times) > 0
    assert first >= 32 << 20 and worker.peak - first >= 90 << 20


@pytest.mark.parametrize("deaf", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
def test_a_worker_that_does_not_end_is_ended(deaf: str) -> None:
    script = f"import signal, time; {deaf}serve(lambda: lambda: None); time.sleep(600)"

    start = time.monotonic()
    with StepWorker([sys.executable, "-c", STEPPING + script], end_s=0.2) as worker:
        worker.run(1)

    assert time.monotonic() - start < 500


def test_a_worker_tells_what_its_steps_return() -> None:
    with StepWorker([sys.executable, "-c", STEPPING + "serve(lambda: lambda: 0.5)"]) as worker:
        worker.run(1, count=False)
        worker.run(2)

    assert worker.values == [0.5, 0.5, 0.5] and len(worker.cpu_ms) == 2


def test_what_a_worker_prints_does_not_disturb_it() -> None:
    with StepWorker([sys.executable, "-c", STEPPING + "serve(lambda: lambda: print('noise'))"]) as worker:
        assert len(worker.run(2)) == 2


def test_a_worker_that_ends_says_why() -> None:
    worker = StepWorker([sys.executable, "-c", STEPPING + "serve(lambda: lambda: 1 / 0)"])

    with pytest.raises(WorkerFailed, match=r"^ZeroDivisionError: division by zero$") as raised, worker:
        worker.run(1)
    assert raised.value.log.startswith("Traceback")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "cnn"])
def test_the_eager_baseline_does_the_work_of_the_algorithm(model: str) -> None:
    """Otherwise the comparison would be with something easier."""
    submodel = built(model, {"size": 8}, "strong")
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
    algorithm = algorithms.build("sgd", Objective.of(submodel), batch=4, **settings)
    step = algorithm.phases[0].function
    batches = [step.example(seed) for seed in range(2)]
    weights = {f"weights.{name}": value.detach() for name, value in submodel.suffix.state_dict().items()}
    module = to_torch_layers(submodel.suffix)
    pairs = [(batch["batch.0.x"], batch["batch.0.y"]) for batch in batches]
    eager = stepper(module, loss_as_torch(submodel.spec.loss), optimizer(module, **settings), pairs)

    state = algorithm.start(weights)
    for batch in batches:
        eager()
        data = {name: value for name, value in batch.items() if name.startswith("batch.")}
        told = step({**state, **data, "hyper.lr": torch.tensor(settings["lr"])})
        state = {name: value for name, value in told.items() if name.startswith("state.")}

    for name, value in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(value, state[f"state.weights.{name}"], rtol=1e-4, atol=1e-5)


def test_the_baseline_has_torchs_own_layers() -> None:
    module = nn.Sequential(
        Lstm(3, 4, layers=2, dropout=0.5), BiLstm(4, 5, 6), *built("resnet8", {}, "strong").suffix
    )

    kinds = [type(part) for part in to_torch_layers(module).modules()]

    assert not [kind for kind in kinds if kind.__module__.startswith("edgefl.models.layers.recurrent")]
    assert kinds.count(nn.LSTM) == 2 and nn.Dropout in kinds
    assert to_torch_layers(module[:2])(torch.zeros(2, 6, 3)).shape == (2, 10)


class Cubic:
    """A kind of loss that somebody else wrote."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return (out - y).pow(3).sum(dim=1)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(len(y))

    def label(self, out: TensorSpec) -> TensorSpec:
        return out


@pytest.mark.parametrize(
    ("loss", "out", "y"),
    [
        (CrossEntropy(0.1), (4, 5), torch.tensor([0, 4, 2, 1])),
        (CrossEntropy(), (4, 1), torch.tensor([0, 1, 1, 0])),
        (SequenceCrossEntropy(), (2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])),
        (SequenceCrossEntropy(4), (2, 3, 5), torch.tensor([[0, 4, 4], [1, 4, 3]])),
        (CrossEntropy(ignore_index=-1), (2, 5, 3), torch.tensor([[0, -1, -1], [1, 4, 3]])),
        (CausalLM(ignore_index=None, shift=False), (2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])),
        (CausalLM(ignore_index=4), (2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])),
        (BinaryCrossEntropy(), (2, 3), torch.tensor([[0.0, 1, 1], [1, 0, 0]])),
        (SquaredError(), (2, 3), torch.ones(2, 3)),
        (Cubic(), (2, 3), torch.ones(2, 3)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Tensor | tuple) else "",
)
def test_losses_of_torch_are_losses_of_the_models(loss: Loss, out: tuple[int, ...], y: Tensor) -> None:
    z = torch.randn(out, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(loss_as_torch(loss)(z, y), batch_mean(loss, loss.each(z, y), y))


# -- what the benchmark train-step compares with ---------------------------------------------------------------


BASELINES_SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
Batches = list[tuple[Tensor, Tensor]]
Change = Callable[[nn.Module, Batches], tuple[nn.Module, Batches]]


def unchanged(module: nn.Module, batches: Batches) -> tuple[nn.Module, Batches]:
    return module, batches


def trained(
    model: str, change: Change, make: Callable[..., Callable[[], object]]
) -> tuple[list[object], dict[str, Tensor]]:
    """Losses and weights of three steps, which are as many as a worker makes before the race."""
    submodel = built(model, {"size": 8}, "strong")
    numbers = torch.Generator().manual_seed(0)
    shape = (4, *submodel.boundary.shape)
    batches = [(torch.randn(shape, generator=numbers), torch.arange(4)) for _ in range(2)]
    module, batches = change(to_torch_layers(submodel.suffix), batches)
    step = make(module, loss_as_torch(submodel.spec.loss), optimizer(module, **BASELINES_SGD), batches)
    return [step() for _ in range(baselines.FIRST)], dict(module.state_dict())


def test_with_channels_last_torch_trains_the_same_model() -> None:
    losses, wanted = trained("resnet8", unchanged, stepper)
    others, found = trained("resnet8", channels_last, stepper)

    assert others == pytest.approx(losses, rel=1e-5)
    for name, value in wanted.items():
        layout = torch.channels_last if value.dim() == 4 else torch.contiguous_format
        assert found[name].is_contiguous(memory_format=layout)
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torch_compile_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    losses, wanted = trained("mlp", unchanged, stepper)
    others, found = trained("mlp", unchanged, compiled)

    assert others == pytest.approx(losses, rel=1e-5)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def job(folder: Path, model: str, settings: TrainStepSettings | None = None) -> RaceJob:
    submodel = built(model, {}, "strong")
    return RaceJob(model, folder, submodel, settings or TrainStepSettings(), noisy=False)


def outcome_of(name: str, work: RaceJob) -> BaselineResult:
    with contextlib.ExitStack() as stack:
        return open_baseline(stack, name, work, StepWorker(()))


def test_channels_are_of_images(tmp_path: Path) -> None:
    outcome = outcome_of("channels_last", job(tmp_path, "bilstm"))

    assert outcome.worker is None and "only images have channels" in str(outcome.problem)
    assert outcome.fields("channels_last")["channels_last_ms"] is None


@pytest.mark.slow
def test_a_machine_without_a_compiler_costs_only_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    asked = TrainStepSettings(batch=2, repeat=1, options={"size": 4}, compile=True, channels_last=True)

    row = measure("mlp", asked)

    assert row.compile_ms is None and str(row.compile_error).startswith("torch.compile failed: ")
    assert "no-compiler" in str(row.compile_error) and "\n" not in str(row.compile_error)
    assert row.channels_last_error is None
    assert 0 < (row.channels_last_ms_min or 0) <= (row.channels_last_ms or 0)


@pytest.mark.slow
def test_the_compiled_step_stands_in_the_row() -> None:
    command = [sys.executable, "-m", "benchmarks", "train-step", "--model", "mlp", "--batch", "4"]
    more = ["--repeat", "1", "--option", "size=4", "--compile", "--json"]

    ran = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, check=False)

    [row] = json.loads(ran.stdout)["results"]
    assert row["compile_error"] is None and row["compile_loss_error"] < 1e-5
    assert 0 < row["compile_ms_min"] <= row["compile_ms"]


def test_losses_of_something_else_are_told() -> None:
    assert loss_error([2.0, 1.5, 1.25], [2.0, 1.5, 1.2501]) == pytest.approx(8e-5, rel=1e-2)

    with pytest.raises(EdgeflError, match=r"trains something else: .*; 1\.5 and 1\.5; 1\.25 and 1\.4$"):
        loss_error([2.0, 1.5, 1.25], [2.0, 1.5, 1.4])


# -- the baseline of `python -m benchmarks train-step` computes what the measured model computes -----------


class Rows(nn.Module):
    """Rows of an image (B, 1, T, 6) -> the mean of torch's hidden states, and the last state of an LSTM or GRU."""

    def __init__(self, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0] if self.layers.batch_first else x[:, 0].transpose(0, 1)
        out, last = self.layers(x)
        h = last[0] if isinstance(last, tuple) else last
        mean = out.mean(1 if self.layers.batch_first else 0)
        result: Tensor = self.head(torch.cat((mean, h[-1]), dim=1))
        return result


def _rows(layers: nn.LSTM | nn.GRU) -> nn.Module:
    module = Rows(layers)
    module(torch.zeros(2, 1, 5, 6))
    return module


def gru(classes: int = 3) -> nn.Module:
    """A user's factory."""
    return _rows(nn.GRU(6, 4, 2, batch_first=True, dropout=0.2, bidirectional=True))


def lstm(classes: int = 3) -> nn.Module:
    """Another one, with torch's default order of dimensions."""
    return _rows(nn.LSTM(6, 4))


def no_weights(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Softmax(dim=1))


@pytest.mark.parametrize("make", [gru, lstm])
def test_a_users_recurrent_layers_stay_torchs_own(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    written = make()
    x = torch.randn(4, 1, 5, 6)
    module = nn.Sequential(trainable_copy(written))

    back = to_torch_layers(module)

    kinds = [type(part) for part in back.modules()]
    assert type(written.get_submodule("layers")) in kinds
    assert back[0].layers.batch_first is written.get_submodule("layers").batch_first
    torch.testing.assert_close(back.eval()(x), written.eval()(x))
    check_torch_layers(module, x)


@pytest.mark.slow
def test_a_users_recurrent_model_is_measured() -> None:
    options = {"classes": 3, "sample_shape": [1, 5, 6]}

    row = measure(f"{__name__}:lstm", TrainStepSettings(batch=2, repeat=1, options=options))

    assert row.ms > 0 and row.eager_ms > 0 and row.max_rel_error < 1e-4


@pytest.mark.parametrize(
    "module",
    [
        Lstm(6, 4, layers=2, dropout=0.5, bidirectional=True),
        Gru(6, 4, layers=2, dropout=0.5),
        BiLstm(6, 4, 5),
    ],
    ids=lambda module: type(module).__name__,
)
def test_our_recurrent_layers_keep_their_values(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1, 1, generator=generator)

    check_torch_layers(nn.Sequential(module), torch.randn(3, 5, 6, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "bilstm"])
def test_models_of_the_zoo_pass_the_check(model: str) -> None:
    submodel = built(model, {}, "strong")

    check_torch_layers(submodel.suffix, submodel.boundary.rows(3).zeros())


class Sum(Lstm):
    """A layer that is called otherwise than the one it descends from."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)[0].sum(dim=1)


class Twice(Lstm):
    """The same shape, other values."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.run(x)[0]


@pytest.mark.parametrize(("wrong", "found"), [(Sum, "give (2, 5, 4)"), (Twice, "differ by 0.5")])
def test_a_baseline_that_computes_something_else_is_not_timed(wrong: type[Lstm], found: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_torch_layers(nn.Sequential(wrong(6, 4)), torch.ones(2, 5, 6))

    assert found in raised.value.message and "nothing fair to measure against" in raised.value.message


def test_frozen_parameters_stay_frozen() -> None:
    module = nn.Sequential(BatchNorm(3), Lstm(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    module[1].requires_grad_(False)

    assert sum(parameter.requires_grad for parameter in to_torch_layers(module).parameters()) == 2


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3))
    x = torch.arange(12.0).view(4, 3)

    check_torch_layers(module, x)
    back = to_torch_layers(module)
    back(x)
    assert torch.equal(back[0].running_mean, torch.zeros(3))
    assert not torch.equal(back[1].running_mean, torch.zeros(3))


def test_a_model_without_weights_has_nothing_to_train() -> None:
    options = {"classes": 3, "sample_shape": [1, 1, 3]}

    with refuses(ModelError, units=2):
        measure(f"{__name__}:no_weights", TrainStepSettings(batch=2, repeat=1, options=options))


@pytest.mark.slow
def test_a_process_that_ends_is_told_in_a_line_and_its_log_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "no number")

    with pytest.raises(EdgeflError) as raised:
        measure("mlp", TrainStepSettings(batch=2, repeat=1, options={"size": 4}))

    assert "ended: " in raised.value.message and "\n" not in raised.value.message
    assert "PYTHONHASHSEED" in str(raised.value.details["log"])
