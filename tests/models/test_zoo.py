"""Models by name: sizes, seeds, names, and models of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.copies import trainable_copy
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.basic import bilstm, cnn, elu_mlp, mlp
from edgefl.models.zoo.catalog import MODELS, build_model
from edgefl.models.zoo.convnext import Block, ChannelNorm, convnext
from edgefl.models.zoo.language import lstm_lm
from edgefl.models.zoo.mobilenet import mobilenet
from edgefl.models.zoo.resnet import resnet8, resnet18, resnet20
from edgefl.models.zoo.transformer import Attention, bert, gpt, vit
from tests.pairs import by_default
from tests.support.errors import ModelError, refuses

# Parameters at the defaults, and the published sizes; of BERT-mini without its 2 segment vectors, with 2 classes.
SIZES: dict[str, tuple[Callable[[], ModelSpec], int]] = {
    "resnet20": (resnet20, 272_762),
    "resnet8": (resnet8, 78_042),
    "resnet8 of colours": (lambda: resnet8(in_channels=3, size=32), 78_330),
    "cnn": (cnn, 6_603_710),
    "bilstm": (bilstm, 3_611_137),
    "mlp": (lambda: mlp(hidden=(5,)), 784 * 5 + 5 + 5 * 10 + 10),
    "resnet18": (resnet18, 11_173_962),
    "mobilenet": (mobilenet, 2_236_682),
    "elu_mlp": (elu_mlp, 68_270),
    "elu_mlp of colours": (lambda: elu_mlp(in_channels=3, size=32), 251_310),
    "MobileNetV2": (lambda: mobilenet(classes=1000), 3_504_872),
    "ViT-Ti/16": (lambda: vit(size=224, patch=16, depth=12, pool="token", classes=1000), 5_717_416),
    "BERT-mini": (lambda: bert(vocabulary=30_522, length=512), 11_170_560 - 2 * 256 + (256 * 2 + 2)),
    "ConvNeXt-T": (
        lambda: convnext(size=224, patch=4, widths=(96, 192, 384, 768), depths=(3, 3, 9, 3), classes=1000),
        28_589_128,
    ),
    "FAFED's language model": (lambda: lstm_lm(vocabulary=33_278, features=650, hidden=650), 50_065_078),
}
LARGE = ("ConvNeXt-T", "FAFED's language model")


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", by_default(SIZES, [name for name in SIZES if name not in LARGE]))
def test_parameter_counts(name: str) -> None:
    make, parameters = SIZES[name]
    spec = make()
    assert sum(parameter.numel() for parameter in spec.module.parameters()) == parameters
    assert spec.boundary(len(spec.units)).shape[-1:] in {(spec.classes,), (1,)}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_are_finite_floats_named_by_their_unit(name: str) -> None:
    spec = build_model(name)
    for key, tensor in spec.weights.items():
        assert tensor.is_floating_point() and torch.isfinite(tensor).all() and tensor.abs().max() <= 5, key
    assert {key.partition(".")[0] for key in spec.weights} == set(spec.units)


def test_language_models_label_every_token() -> None:
    spec = lstm_lm(length=7, vocabulary=30, features=4, hidden=4)
    assert spec.boundary(3) == TensorSpec((7, 30))
    assert spec.label == TensorSpec((7,), torch.int64, 30)
    assert spec.sample.below == 30


def test_a_vit_reads_the_token_or_the_mean_of_the_patches() -> None:
    small = {"size": 8, "width": 12, "depth": 1}
    assert vit(**small).boundary(1).shape == (4, 12)
    assert vit(**small, pool="token").boundary(1).shape == (5, 12)
    with refuses(ModelError, pool="max"):
        vit(pool="max")
    with refuses(ModelError, width=12, heads=5):
        vit(**small, heads=5)
    with refuses(ModelError, size=8, patch=3):
        vit(**small, patch=3)


def test_attention_mixes_positions_and_equals_torch_s_own() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.in_proj_weight, theirs.in_proj_bias = ours.qkv.weight, ours.qkv.bias
    theirs.out_proj.weight, theirs.out_proj.bias = ours.out.weight, ours.out.bias
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("name", ["resnet8", "mlp"])
def test_a_seed_decides_every_byte_and_leaves_the_global_generator_alone(name: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = build_model(name, seed=1), build_model(name, seed=1), build_model(name, seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first.weights[key], again.weights[key]) for key in first.weights)
    assert any(not torch.equal(first.weights[key], other.weights[key]) for key in first.weights)


def test_unknown_models_and_options_name_what_exists() -> None:
    with pytest.raises(
        ModelError,
        match="bert, bilstm, cnn, convnext, elu_mlp, fedbat_cnn, gpt, lstm_lm, mlp, mobilenet, resnet10, resnet18, "
        "resnet20, resnet8, vit",
    ):
        build_model("resnet99")
    with pytest.raises(ModelError, match=r"no option 'depth'.*widths"):
        build_model("resnet8", depth=3)
    with pytest.raises(ModelError, match="cannot load"):
        build_model("no_such_package:model")
    with refuses(ModelError, mode="group"):
        build_model("resnet8", bn="group")
    with refuses(ModelError, cut=9, units=("stem", "block1", "block2", "block3", "head")):
        resnet8().boundary(9)


FACTORIES = """
from torch import nn
def plain(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
        self.head = nn.Linear(3, 10)
    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))
def cut():
    return Net(), ["features"]
def wrong():
    return 3
def raises():
    return nn.Sequential(nn.Linear(4, oops))
def misfit():
    return nn.Sequential(nn.Flatten(), nn.Linear(17, 10))
class Misfit(Net):
    def forward(self, x):
        return self.head(self.features(x).mean(3).flatten(1))
def misfit_module():
    return nn.Sequential(Misfit())
def misfit_tail():
    return Misfit(), ["features"]
def demanding(width):
    return nn.Sequential(nn.Linear(width, 10))
number = 3
"""


def _line(text: str) -> str:
    """``file:line`` of a line of the factories, as a pattern."""
    return rf"my_models\.py:{FACTORIES[: FACTORIES.index(text)].count(chr(10)) + 1}\)"


FAULTS = {
    "raises": (
        "the factory '.*:raises' .*NameError: name 'oops'.*" + _line("return nn.Sequential(nn.Linear(4, oops")
    ),
    "misfit": ("unit '1' cannot read samples of shape \\(16,\\) float32.*17.*" + _line("def misfit()")),
    "misfit_module": "unit '0' cannot .* RuntimeError: .*"
    + _line("return self.head(self.features(x).mean(3)"),
    "misfit_tail": "cannot trace Misfit .* RuntimeError: .*"
    + _line("return self.head(self.features(x).mean(3)"),
    "demanding": "missing 1 required .*'width'.*" + _line("def demanding"),
    "number": "has no function .number.",
}


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_models.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_models"
    sys.modules.pop("my_models", None)


def test_a_factory_of_the_user_s_own_becomes_a_unit_list(factories: str) -> None:
    plain = build_model(f"{factories}:plain", in_channels=1, size=4, classes=10, seed=3)
    again = build_model(f"{factories}:plain", in_channels=1, size=4, classes=10, seed=3)
    assert plain.units == ("0", "1", "2", "3", "4")
    assert all(torch.equal(plain.weights[key], again.weights[key]) for key in plain.weights)
    assert "2.num_batches_tracked" not in plain.weights
    assert build_model(f"{factories}:cut", sample_shape=[1, 4, 4], classes=10).units == ("features", "tail")


def test_a_factory_that_returns_something_else_is_refused(factories: str) -> None:
    with pytest.raises(ModelError, match="found int"):
        build_model(f"{factories}:wrong", sample_shape=[4], classes=2)
    with pytest.raises(ModelError, match="'classes'"):
        build_model(f"{factories}:cut", sample_shape=[1, 4, 4])
    with pytest.raises(ModelError, match="'sample_shape'"):
        build_model(f"{factories}:cut", classes=10)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_user_s_code_is_reported_with_its_line(factories: str, name: str) -> None:
    with pytest.raises(ModelError, match=FAULTS[name]):
        build_model(f"{factories}:{name}", sample_shape=[1, 4, 4], classes=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def model(:", r"cannot load model 'broken:model': SyntaxError: .*broken\.py:1\)"),
        ("1 / 0", r"cannot load model 'broken:model': ZeroDivisionError: .*broken\.py:1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=message):
        build_model("broken:model", sample_shape=[4], classes=2)


def test_a_cumulative_average_is_refused() -> None:
    with refuses(ModelError, module="0"):
        trainable_copy(nn.Sequential(nn.BatchNorm1d(3, momentum=None)))


def test_elu_mlp_begins_with_variance_one_over_inputs_and_zero_biases() -> None:
    spec = elu_mlp(hidden=(400, 300))
    for name, tensor in spec.weights.items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        else:
            assert tensor.std().item() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.05), name
    x = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    first = spec.module[0]
    assert torch.equal(first(x), nn.functional.elu(first.dense(x.flatten(1))))


def test_convnext_adds_to_what_came_in_and_norms_over_channels() -> None:
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    spec = convnext(size=16, widths=(4, 8), depths=(1, 1), classes=3)
    normed = ChannelNorm(4)(x)

    assert torch.allclose(normed.mean(1), torch.zeros(2, 5, 6), atol=1e-5)
    assert spec.module(torch.randn(2, *spec.sample.shape)).shape == (2, 3)
    block = Block(4, 0.0)
    with torch.no_grad():
        block.scale.weight.zero_()
    assert torch.equal(block(x), x)


def test_a_gpt_predicts_from_earlier_tokens_alone() -> None:
    spec = gpt(length=8, vocabulary=20, width=12, depth=2)
    module = spec.module.eval()
    first = torch.arange(8).remainder(20)[None]
    other = first.clone()
    other[0, 5] = 19

    before, after = module(first), module(other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert spec.shortened(4).boundary(1).shape == (4, 12)
