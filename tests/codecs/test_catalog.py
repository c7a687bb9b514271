"""What a codec takes, refuses and leaves out: options, parameters that are not trained, shares of large tensors."""

from __future__ import annotations

import pytest
from torch import nn

from edgefl.codecs.catalog import CODECS
from edgefl.codecs.packing import UpdateParts
from edgefl.errors import ConfigError, ModelError
from edgefl.models.layers.norms import make_norm
from edgefl.models.spec import ModelSpec
from edgefl.wire.update.form import FloatValues, Sparse
from tests.codecs.coding import Coding, small


@pytest.mark.parametrize("codec", ["signsgd", "int8", "fedbat", "float16"])
def test_statistics_of_other_widths_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="2 to 8 bits each, or in 32 as float32; found statistics = 16"):
        Coding.of(codec, statistics=16).algorithm  # noqa: B018


def test_zerofl_without_sparse_upload_sends_whole_changes() -> None:
    coding = Coding.of("zerofl", sparse_upload=False, statistics=4)
    trained, statistics = coding.algorithm.form.sections
    assert trained.encoding == FloatValues() and coding.algorithm.form.change
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
    assert Sparse(share).kept(entries) == kept


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
    with pytest.raises(ConfigError, match="no tensor to code here"):
        Coding.of("signsgd", spec, binarize_1d=False).algorithm  # noqa: B018


def test_moving_statistics_are_buffers_only() -> None:
    objective = Coding.of("signsgd", frozen()).objective
    assert all("running" in name for name in objective.buffers)
    assert set(objective.fixed) - set(objective.buffers)
    assert set(UpdateParts.of(objective, binarize_1d=True).statistics) == set(objective.buffers)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "bn", "groups": 4}, "batch norm has no groups"),
        ({"kind": "gn", "keep": 0.5}, "keeps no statistics"),
        ({"kind": "gn", "mode": "static"}, "no batch norm mode"),
    ],
)
def test_options_of_the_other_norm_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make_norm(**options)  # type: ignore[arg-type]
    assert isinstance(make_norm("gn", groups=2)(4), nn.GroupNorm)
