"""What a codec takes, refuses and leaves out: options, parameters that are not trained, shares of large tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgefl import algorithms
from edgefl.codecs import catalog as codecs
from edgefl.codecs.apply import apply_codec
from edgefl.codecs.catalog import CODECS
from edgefl.codecs.packing import UpdateParts, bfloat16_bits, pack_codes
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import select
from edgefl.models.layers.norms import make_norm
from edgefl.models.spec import ModelSpec
from edgefl.objective.objective import Objective
from edgefl.optimizers import with_optimizer
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.update import decode
from edgefl.wire.update.form import FloatEncoding, SparseEncoding
from tests.codecs.coding import Coding, small
from tests.support.errors import ConfigError, ModelError, refuses


@pytest.mark.parametrize("codec", ["signsgd", "int8", "fedbat", "float16"])
def test_statistics_of_other_widths_are_refused(codec: str) -> None:
    with refuses(ConfigError, bits=16):
        Coding.of(codec, statistics=16).algorithm  # noqa: B018


def test_zerofl_without_sparse_upload_sends_whole_changes() -> None:
    coding = Coding.of("zerofl", sparse_upload=False, statistics=4)
    trained, statistics = coding.algorithm.form.sections
    assert trained.encoding == FloatEncoding() and coding.algorithm.form.change
    assert getattr(statistics.encoding, "bits", None) == 4


@pytest.mark.parametrize(
    ("share", "entries", "kept"),
    [
        (0.03, 100, 3),
        (0.03, 101, 4),
        (round(1 - 0.97, 12), 40_000_000, 1_200_000),
        (1 - 0.97, 40_000_000, 1_200_000),
        (1e-9, 5, 1),
        (1.0, 7, 7),
    ],
)
def test_a_share_is_rounded_up_to_entries_but_not_for_a_hair(share: float, entries: int, kept: int) -> None:
    assert SparseEncoding(share).kept(entries) == kept


def frozen() -> ModelSpec:
    """The small model, one convolution of which is not trained."""
    spec = small()
    next(p for p in spec.module.parameters() if p.dim() == 4).requires_grad_(False)
    return spec


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"dense", "bifl", "bifl_full"}))
def test_parameters_that_are_not_trained_do_not_travel_as_changes(codec: str) -> None:
    coding = Coding.of(codec, frozen())
    still = {n for n, p in coding.submodel.spec.module.named_parameters() if not p.requires_grad}
    sent = {name for section in coding.algorithm.form.sections for name in section.names}
    assert len(still) == 1
    assert sent == set(coding.regions) - still
    assert set(coding.algorithm.form.held(coding.regions)) == sent


def test_a_form_of_weights_has_those_too_for_the_server_averages_them() -> None:
    coding = Coding.of("bifl", frozen())
    sent = {name for section in coding.algorithm.form.sections for name in section.names}
    assert sent == set(coding.regions) == set(coding.algorithm.form.held(coding.regions))


def test_a_codec_that_is_left_nothing_to_code_says_so() -> None:
    spec = small()
    for parameter in spec.module.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    with refuses(ConfigError, codec="signsgd"):
        Coding.of("signsgd", spec, binarize_1d=False).algorithm  # noqa: B018


def test_moving_statistics_are_buffers_only() -> None:
    objective = Coding.of("signsgd", frozen()).objective
    assert all("running" in name for name in objective.buffers)
    assert set(objective.fixed) - set(objective.buffers)
    assert set(UpdateParts.of(objective, binarize_1d=True).statistics) == set(objective.buffers)


@pytest.mark.parametrize(
    ("options", "details"),
    [({"kind": "bn", "groups": 4}, {"groups": 4}), ({"kind": "gn", "mode": "static"}, {"bn": "static"})],
)
def test_options_of_the_other_norm_are_refused(
    options: dict[str, object], details: dict[str, object]
) -> None:
    with refuses(ModelError, **details):
        make_norm(**options)  # type: ignore[arg-type]
    assert isinstance(make_norm("gn", groups=2)(4), nn.GroupNorm)


# -- which algorithms a codec goes with: those whose update is the trained weights and nothing else --------


TRAINING = {"batch": 2, "steps": 2, "lr": 0.1}
OWN = ("scaffold", "local_amsgrad", "mimeadam", "mimelite", "local")


def _objective() -> Objective:
    return Objective.of(OutputSide(small(), 0))


@pytest.mark.sample(7)
@pytest.mark.parametrize("codec", ["signsgd", "int8", "fedpaq", "topk"])
@pytest.mark.parametrize("algorithm", OWN)
def test_an_algorithm_that_sends_or_keeps_more_than_weights_is_refused(algorithm: str, codec: str) -> None:
    made = algorithms.build(algorithm, _objective(), **TRAINING)

    with pytest.raises(ConfigError, match=f"codec '{codec}'.*{algorithm!r} sends or keeps more.*codec dense"):
        apply_codec(codecs.build(codec), made, _objective())


def test_only_a_fresh_device_optimizer_is_coded() -> None:
    fresh = algorithms.build("adamw", _objective(), **TRAINING)
    kept = algorithms.build("adamw", _objective(), **TRAINING, keep=True)

    assert apply_codec(codecs.build("signsgd"), fresh, _objective()).form.sections
    with pytest.raises(ConfigError, match=r"'carry\.adam\.m"):
        apply_codec(codecs.build("signsgd"), kept, _objective())


@pytest.mark.parametrize("algorithm", OWN)
def test_the_dense_codec_leaves_every_algorithm_as_it_is(algorithm: str) -> None:
    made = algorithms.build(algorithm, _objective(), **TRAINING)

    assert apply_codec(codecs.build("dense"), made, _objective()) is made


@pytest.mark.parametrize("optimizer", ["none", "fedams"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg_update", "fedprox"])
def test_algorithms_that_send_weights_alone_are_coded(algorithm: str, optimizer: str) -> None:
    made = with_optimizer(algorithms.build(algorithm, _objective(), **TRAINING), optimizer)

    coded = apply_codec(codecs.build("signsgd"), made, _objective())

    assert coded.server is made.server
    assert coded.personalize is made.personalize
    assert list(select(coded.finish(coded.finish.example(0)), "update")) == ["codes", "scales"]


# -- many clients in one call ----------------------------------------------------------------------------------


ALL: list[tuple[str, dict[str, Any]]] = [
    ("float16", {}),
    ("bfloat16", {}),
    ("int8", {"feedback": True}),
    ("fedpaq", {"bits": 3}),
    ("signsgd", {}),
    ("ef_signsgd", {}),
    ("noisy_signsgd", {}),
    ("stoc_signsgd", {}),
    ("topk", {"share": 0.1, "feedback": True}),
    ("zerofl", {"sparsity": 0.8}),
    ("bifl", {}),
    ("fedbat", {}),
    ("fedbat", {"step_size": "largest", "upload_mode": "det_sign"}),
    ("fedbat", {"upload_mode": "last_forward", "granularity": "module"}),
]


def compare(function: Function) -> None:
    clients = [function.example(seed) for seed in range(3)]
    together = torch.vmap(function.fn)({name: torch.stack([c[name] for c in clients]) for name in clients[0]})
    for number, client in enumerate(clients):
        for name, expected in function.fn(client).items():
            found = together[name][number]
            assert found.dtype == expected.dtype and found.shape == expected.shape, name
            if expected.dtype.is_floating_point:
                assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5), name
            else:
                assert int((found != expected).sum()) <= 1, name


@pytest.mark.sample(5)
@pytest.mark.parametrize(("codec", "options"), ALL)
def test_finish_runs_under_vmap(codec: str, options: dict[str, Any]) -> None:
    compare(Coding.of(codec, **options).algorithm.finish)


@pytest.mark.parametrize("options", [{}, {"step_size": "largest"}, {"alpha_range": (5e-4, 5e-2)}])
def test_phases_of_fedbat_run_under_vmap(options: dict[str, Any]) -> None:
    for phase in Coding.of("fedbat", **options).algorithm.phases:
        compare(phase.function)


# -- numbers as bytes inside a graph: bit order, and bfloat16 as torch itself has it -----------------------


def torch_bits(x: torch.Tensor) -> list[int]:
    """uint16 bits of torch's own bfloat16."""
    return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).tolist()


def test_first_code_is_the_lowest_bit_of_the_first_byte() -> None:
    assert pack_codes([torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1])], 1).tolist() == [1, 3]
    assert pack_codes([torch.arange(7.0)], 3).numpy().tobytes().hex() == "88c61a"


def test_each_tensor_begins_with_a_byte_of_its_own() -> None:
    assert pack_codes([torch.ones(1), torch.ones(2, 2), torch.zeros(8)], 1).tolist() == [1, 15, 0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_graph_and_server_pack_alike(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 1_001)
    packed = pack_codes([torch.from_numpy(codes)], bits).numpy()
    assert packed.tobytes() == decode.pack_codes(codes.astype(np.uint8), bits).tobytes()


def test_bfloat16_has_torchs_bits_for_normal_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-126, 127.0).repeat_interleave(40)
    x = (1 + torch.rand(exponents.shape, generator=generator)) * 2.0**exponents
    assert bfloat16_bits(x).tolist() == torch_bits(x)
    assert bfloat16_bits(-x).tolist() == torch_bits(-x)


def test_bfloat16_rounds_ties_to_even_and_carries_into_the_exponent() -> None:
    ties = torch.tensor([1 + (2 * n + 1) / 256 for n in range(128)])
    for scale in (2.0**-126, 2.0**-3, 1.0, 2.0**100):
        assert bfloat16_bits(ties * scale).tolist() == torch_bits(ties * scale)
    # The last one is half a step below 2: it becomes 2, of the next exponent.
    assert decode.widen(bfloat16_bits(ties[-1:]).numpy()).tolist() == [2.0]


def test_bfloat16_of_zero_and_subnormals_is_zero() -> None:
    assert bfloat16_bits(torch.tensor([0.0, -0.0])).tolist() == [0, 0]
    small = torch.tensor([2.0**-127, -(2.0**-127), 2.0**-140, -(2.0**-149)])
    assert decode.widen(bfloat16_bits(small).numpy()).tolist() == [0, 0, 0, 0]


def test_bfloat16_of_what_is_not_finite_is_never_finite() -> None:
    """The server must see that training diverged."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max])
    assert not np.isfinite(decode.widen(bfloat16_bits(x).numpy())).any()


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or abs(x) >= 2**-126)
)
def test_bfloat16_of_any_number_is_torch_s(number: float) -> None:
    x = torch.tensor([number])
    expected = [0] if number == 0 else torch_bits(x)
    assert bfloat16_bits(x).tolist() == expected
