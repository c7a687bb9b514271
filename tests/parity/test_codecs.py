"""Coding on devices: every codec's ``finish`` on each engine beside torch, and whole coded rounds with what they keep."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, select
from edgefl.objective.objective import Objective
from edgefl.setup.training import algorithm_of
from edgefl.submodels import catalog as kinds
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.regions import Placement
from edgefl.wire.update.decode import decode
from edgefl_device.data import samples as local
from edgefl_device.data.samples import Batches, LabelSpec
from edgefl_device.round.trainer import RoundResult
from edgefl_export.compiler.request import blobs_to_fetch
from tests.pairs import FORMATS, by_default, in_both, in_turn
from tests.parity.coding import federation, silence, spec, submodel  # noqa: F401  silence: a fixture
from tests.parity.forms import checked, engine_of
from tests.parity.rounds import by_unit, device_round, local_data
from tests.support.bundles import build_bundle

ALL = {
    "float16": {},
    "bfloat16": {},
    "int8": {},
    "fedpaq": {"bits": 3},
    "signsgd": {},
    "scaled_sign": {},
    "ef_signsgd": {},
    "noisy_signsgd": {},
    "stoc_signsgd": {},
    "fedbat": {},
    "topk": {"share": 0.1},
    "zerofl": {"sparsity": 0.8},
    "bifl": {},
}
OPTIONS = [
    ("int8", {"feedback": True, "statistics": 32}),
    ("topk", {"feedback": True, "binarize_1d": False}),
    ("fedbat", {"granularity": "global", "upload_mode": "last_forward", "binarize_1d": False}),
    ("fedbat", {"step_size": "largest", "upload_mode": "det_sign", "statistics": 32}),
    ("ef_signsgd", {"sign0": "plus"}),
]


def exported(form: str, codec: str, options: dict[str, object], kind: str) -> None:
    """Export ``finish`` and compare it with torch: bytes to the bit, where no function of the engine's own decides."""
    training = "multi_exit" if kind == "early_exit" else "sgd"
    # What trains with weights in a form of its own has no frozen units.
    algorithm = algorithm_of(
        federation(codec, options, training), submodel(kind, cut=0 if codec in ("zerofl", "bifl") else 1)
    )
    report = checked(form, algorithm.finish, 3)

    bytewise = {"update.codes", "update.mask"} | ({"update.halves"} if codec == "bfloat16" else set())
    assert bytewise & report.errors.keys() or codec == "float16"
    for name in bytewise & report.errors.keys():
        assert report.errors[name] == 0 or name in report.rounding, name
    assert not report.rounding or codec == "noisy_signsgd", "an erf of the engine's own decides a sign"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("codec", "kind", "form"),
    by_default(
        product(ALL, ("output_side", "importance"), FORMATS),
        [
            ("float16", "output_side", "onnx"),
            ("fedpaq", "importance", "executorch"),
            ("fedbat", "output_side", "executorch"),
            ("bifl", "output_side", "onnx"),
            ("topk", "output_side", "executorch"),
            ("scaled_sign", "importance", "onnx"),
        ],
    ),
)
def test_coded_finish_gives_the_same_bytes_on_the_device(codec: str, kind: str, form: str) -> None:
    if kind == "importance" and codec in ("ef_signsgd", "bifl"):
        kind = "width"
    exported(form, codec, ALL[codec], kind)


@pytest.mark.parametrize(
    ("codec", "kind", "form"),
    [
        *in_both("fedpaq", "importance_structured"),
        *in_turn(
            [("bfloat16", "early_exit")],
            rare=[
                ("scaled_sign", "width"),
                ("topk", "early_exit"),
                ("bfloat16", "width"),
                ("fedpaq", "early_exit"),
                ("topk", "importance_structured"),
                ("scaled_sign", "importance_structured"),
                ("topk", "width"),
            ],
        ),
    ],
)
def test_coded_finish_gives_the_same_bytes_for_every_kind(codec: str, kind: str, form: str) -> None:
    exported(form, codec, ALL[codec], kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("codec", "options", "form"), in_turn(OPTIONS, every=4))
def test_options_of_a_codec_give_equal_bytes(codec: str, options: dict[str, object], form: str) -> None:
    exported(form, codec, options, "output_side")


# -- whole rounds ----------------------------------------------------------------------------------------------


ROUNDS = [
    ("ef_signsgd", "output_side"),
    ("fedpaq", "importance"),
    ("topk", "importance_structured"),
    ("fedbat", "output_side"),
    ("fedbat", "importance"),
    ("bfloat16", "width"),
]


class Tier:
    """A coded tier with its bundle, on the device and in torch."""

    def __init__(self, form: str, codec: str, options: dict[str, object], kind: str) -> None:
        self.form = form
        self.submodel = kinds.build(spec(), kind, **({} if kind == "output_side" else {"gamma": 0.25}))
        self.algorithm: Algorithm = algorithm_of(federation(codec, options), self.submodel)
        self.names = blobs_to_fetch(self.submodel, "tier")
        self.bundle: BundleArchive = build_bundle(
            self.algorithm,
            self.names,
            model="fedbat_cnn",
            data=DataSpec(shape=spec().sample.shape, dtype="float32", classes=spec().classes),
            format=form,
        )
        self.data = local_data(spec(), 9, seed=5).fitted(
            self.bundle.manifest.data, LabelSpec.of(self.bundle.manifest)
        )
        self.weights = {name: tensor.detach().numpy() for name, tensor in spec().weights.items()}
        self.placement: Placement = self.submodel.place(self.weights, 1)

    @property
    def payload(self) -> dict[str, np.ndarray]:
        return dict(self.placement.payload or self.weights)

    def on_device(self, seed: int, carry: dict[str, np.ndarray], folder: Path) -> RoundResult:
        if self.placement.payload:
            contents = dict.fromkeys(self.names, tensors.dump(self.payload, self.placement.masks))
        else:
            contents = by_unit(self.weights, self.names, self.placement.masks)
        made = device_round(self.bundle, contents, engine_of(self.form), folder, seed=seed)
        return made.run(self.data, carry)

    def in_torch(self, seed: int, carry: Tensors) -> tuple[Tensors, Tensors]:
        """(update, what is kept) of the same functions, with the batches and the noise that the device draws."""
        manifest = self.bundle.manifest
        batches = Batches(seed, len(self.data), manifest.batch)
        known = {f"hyper.{name}": torch.tensor(value) for name, value in self.algorithm.hyper.items()}
        known |= {f"weights.{name}": torch.from_numpy(array.copy()) for name, array in self.payload.items()}
        known |= {
            name: spec.zeros()
            for name, spec in self.algorithm.finish.inputs.items()
            if name.startswith("carry.")
        }
        known |= carry

        def call(function: Function, graph: str, draw: int) -> Tensors:
            ports = manifest.graph(graph).inputs_of("noise")
            noise = {
                port.name: torch.from_numpy(local.noise(seed, draw, number, port.shape, port.dtype))
                for number, port in enumerate(ports)
            }
            out = function({name: (known | noise)[name] for name in function.inputs if name in known | noise})
            known.update({name: tensor for name, tensor in out.items() if name.startswith("state.")})
            return out

        call(self.algorithm.start, manifest.start, manifest.steps)
        step = 0
        for phase, described in zip(self.algorithm.phases, manifest.phases, strict=True):
            for _ in range(phase.steps):
                rows = batches.indices(0, step)
                known |= {
                    "batch.0.x": torch.from_numpy(self.data.rows(rows)),
                    "batch.0.y": torch.from_numpy(self.data.labels(rows)),
                }
                call(phase.function, described.graph, step)
                step += 1
        out = call(self.algorithm.finish, manifest.finish, manifest.steps + 1)
        return select(out, "update"), {name: t for name, t in out.items() if name.startswith("carry.")}

    def decoded(self, update: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = {name: array.shape for name, array in self.weights.items()}
        return decode(self.algorithm.form, update, self.placement.regions, shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "kind", "form"), in_turn(ROUNDS[:2], rare=ROUNDS[2:]))
def test_coded_rounds_on_the_device_equal_torch(tmp_path: Path, codec: str, kind: str, form: str) -> None:
    tier = Tier(form, codec, dict(ALL[codec]), kind)
    kept: dict[str, np.ndarray] = {}
    carry: Tensors = {}
    for number in range(2):
        result = tier.on_device(11 + number, kept, tmp_path)
        expected, carry = tier.in_torch(11 + number, carry)

        update = {name: tensor.numpy() for name, tensor in expected.items()}
        assert {n: (a.dtype, a.shape) for n, a in result.update.items()} == {
            n: (a.dtype, a.shape) for n, a in update.items()
        }
        found, told = tier.decoded(dict(result.update)), tier.decoded(update)
        for name, array in told.items():
            # A change that lies on a threshold may fall to either side of it; few do.
            scale = np.abs(array).max(initial=1e-6)
            assert np.mean(np.abs(found[name] - array) > 1e-3 * scale) <= 0.01, name
        kept = dict(result.carry)
        assert {f"carry.{name}" for name in kept} == set(carry)
        assert bool(kept) is (codec == "ef_signsgd")
    manifest = tier.bundle.manifest
    assert (manifest.codec, manifest.codec_version) == (tier.algorithm.form.codec, 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_residual_of_the_last_round_changes_what_the_next_one_sends(tmp_path: Path, form: str) -> None:
    tier = Tier(form, "ef_signsgd", {"sign0": "plus"}, "output_side")
    first = tier.on_device(11, {}, tmp_path)

    afresh = tier.on_device(11, {}, tmp_path)
    again = tier.on_device(11, dict(first.carry), tmp_path)

    assert np.array_equal(afresh.update["codes"], first.update["codes"])
    assert not np.array_equal(again.update["scales"], first.update["scales"])
    for name, residual in first.carry.items():
        own = name.removeprefix("residual.")
        u = first.carry[name] + tier.decoded(dict(first.update))[own] + residual
        told = tier.decoded(dict(again.update))[own]
        assert np.mean(np.sign(told) != np.sign(u)) <= 0.01, name


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_a_device_knows_objective_names_only_by_their_ports(form: str) -> None:
    tier = Tier(form, "ef_signsgd", {}, "output_side")
    finish = tier.bundle.manifest.graph(tier.bundle.manifest.finish)
    residuals = {port.label for port in finish.inputs_of("carry")}
    assert residuals == {f"residual.{name}" for name in Objective.of(tier.submodel).trainable}
    assert {port.label for port in finish.outputs_of("carry")} == residuals


@pytest.mark.parametrize("form", in_turn([()]))
def test_what_finish_measures_is_reported_as_it_is(tmp_path: Path, form: str) -> None:
    tier = Tier(form, "signsgd", {}, "output_side")
    result = tier.on_device(11, {}, tmp_path)
    assert result.metrics["finite"] == 1.0
    entries = sum(tier.weights[name].size for name in tier.algorithm.form.sections[0].names)
    assert 0 <= result.metrics["zeros"] < entries and result.metrics["zeros"].is_integer()
    assert result.metrics["loss"] > 0
