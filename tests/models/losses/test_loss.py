"""Each loss per sample against torch's own, values and gradients; labels, and how right an answer is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.contract.tensors import TensorSpec
from edgefl.models.losses import (
    CTC,
    AbsoluteError,
    BinaryCrossEntropy,
    CausalLM,
    CrossEntropy,
    Huber,
    InfoNCE,
    Loss,
    NTXent,
    Quantile,
    SequenceCrossEntropy,
    SquaredError,
    own_loss,
)
from edgefl.models.losses.loss import batch_mean, without_absent
from edgefl.models.spec import ModelSpec, sequential
from edgefl.objective.objective import Objective, SelfDistillation
from tests.support.errors import ModelError, refuses

Case = tuple[Loss, tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]


def _sequence(out: Tensor, y: Tensor, **options: float) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y, reduction="none", **options).mean(1)  # type: ignore[arg-type]


def _without_padding(out: Tensor, y: Tensor) -> Tensor:
    """Each sample by itself, the mean over the tokens that are not 2."""
    return torch.stack([F.cross_entropy(o, t, ignore_index=2) for o, t in zip(out, y, strict=True)])


CASES: dict[str, Case] = {
    "classes": (CrossEntropy(), (5,), lambda out, y: F.cross_entropy(out, y, reduction="none")),
    "smoothed classes": (
        CrossEntropy(label_smoothing=0.1),
        (5,),
        lambda out, y: F.cross_entropy(out, y, reduction="none", label_smoothing=0.1),
    ),
    "one logit": (
        CrossEntropy(),
        (1,),
        lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(1), y.to(out.dtype), reduction="none"),
    ),
    "tokens": (SequenceCrossEntropy(), (7, 11), _sequence),
    "smoothed tokens": (
        SequenceCrossEntropy(label_smoothing=0.2),
        (7, 11),
        lambda out, y: _sequence(out, y, label_smoothing=0.2),
    ),
    "padded tokens": (SequenceCrossEntropy(ignore_index=2), (7, 4), _without_padding),
    "answers": (
        BinaryCrossEntropy(),
        (6,),
        lambda out, y: F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1),
    ),
    "targets": (SquaredError(), (2, 3), lambda out, y: F.mse_loss(out, y, reduction="none").mean((1, 2))),
}


def _next_token(out: Tensor, y: Tensor) -> Tensor:
    return _sequence(out[:, :-1], y[:, 1:])


def _pinball(out: Tensor, y: Tensor) -> Tensor:
    """Each level by its own definition: what lies below the label costs q, what lies above it 1 - q."""
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=out.dtype)
    error = y.unsqueeze(-1) - out
    return torch.where(error >= 0, levels * error, (levels - 1) * error).mean((1, 2))


def _ctc(out: Tensor, y: Tensor) -> Tensor:
    lengths = torch.full((len(out),), out.shape[1])
    logp = out.log_softmax(-1).transpose(0, 1)
    symbols = (y != 0).sum(1)
    values = F.ctc_loss(logp, y, lengths, symbols, reduction="none", zero_infinity=True)
    return values / symbols.clamp_min(1)


def _clip(out: Tensor, y: Tensor) -> Tensor:
    one, other = F.normalize(out, dim=-1).unbind(1)
    likeness, own = one @ other.T / 0.07, torch.arange(len(out))
    return sum(F.cross_entropy(each, own, reduction="none") for each in (likeness, likeness.T)) / 2


def _simclr(out: Tensor, y: Tensor) -> Tensor:
    views = F.normalize(torch.cat((out[:, 0], out[:, 1])), dim=-1)
    count = len(out)
    likeness = (views @ views.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
    right = torch.arange(2 * count).roll(count)
    return F.cross_entropy(likeness, right, reduction="none").reshape(2, count).mean(0)


def _own_mean(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y, reduction="none").mean(1)


def _own(out: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(out, y, reduction="none").mean(1)


CASES |= {
    "pixels": (
        CrossEntropy(),
        (5, 3, 4),
        lambda out, y: F.cross_entropy(out, y, reduction="none").mean((1, 2)),
    ),
    "pixels of one logit": (
        CrossEntropy(),
        (1, 3, 4),
        lambda out, y: F.binary_cross_entropy_with_logits(
            out.squeeze(1), y.to(out.dtype), reduction="none"
        ).mean((1, 2)),
    ),
    "next tokens": (CausalLM(), (7, 11), _next_token),
    "tokens that follow": (CausalLM(ignore_index=None, shift=False), (7, 11), _sequence),
    "absolute": (AbsoluteError(), (2, 3), lambda out, y: F.l1_loss(out, y, reduction="none").mean((1, 2))),
    "huber": (
        Huber(delta=0.7),
        (4,),
        lambda out, y: F.huber_loss(out, y, reduction="none", delta=0.7).mean(1),
    ),
    "median": (Quantile(), (4,), lambda out, y: F.l1_loss(out, y, reduction="none").mean(1) / 2),
    "quantiles": (Quantile(levels=(0.1, 0.5, 0.9)), (2, 3), _pinball),
    "two views": (InfoNCE(), (2, 6), _clip),
    "all views": (NTXent(), (2, 6), _simclr),
    "a text": (CTC(length=3), (8, 5), _ctc),
    "own": (own_loss(_own, TensorSpec((4,))), (4,), _own),
    "own mean": (own_loss(F.mse_loss, TensorSpec((4,))), (4,), _own_mean),
}


def _example(loss: Loss, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and valid labels of 8 samples."""
    generator = torch.Generator().manual_seed(4)
    out = torch.randn(8, *shape, generator=generator, dtype=dtype) * scale
    label = loss.label(TensorSpec(shape)).rows(8)
    if label.below is None and not label.dtype.is_floating_point:
        return out, torch.zeros(label.shape, dtype=label.dtype)
    if label.below is None:
        return out, torch.randn(label.shape, generator=generator, dtype=dtype)
    y = torch.randint(0, label.below, label.shape, generator=generator)
    if isinstance(loss, CTC):
        y = y.sort(descending=True).values  # blanks follow the text
    return out, y.to(dtype) if label.dtype.is_floating_point else y


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_torch(name: str, scale: float) -> None:
    loss, shape, reference = CASES[name]
    out, y = _example(loss, shape, torch.float64, scale)
    weights = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)

    def derived(each: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = out.clone().requires_grad_()
        values = each(leaf, y)
        return values.detach(), torch.autograd.grad((values * weights).sum(), leaf)[0]

    for found, expected in zip(derived(loss.each), derived(reference), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"a text", "own", "own mean"}))
def test_right_and_wrong_lie_between_0_and_1_per_sample(name: str) -> None:
    loss, shape, _ = CASES[name]
    out, y = _example(loss, shape, torch.float32, 1.0)
    right = loss.correct(out, y)
    assert right.shape == (8,) and right.dtype == torch.float32
    assert right.min() >= 0.0 and right.max() <= 1.0 and 0.0 < right.mean() < 1.0


def test_correct_is_the_share_of_right_entries() -> None:
    logits = torch.tensor([[[0.0, 9.0], [9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]])
    assert SequenceCrossEntropy().correct(logits, torch.tensor([[1, 0, 0, 0]])).tolist() == [0.75]
    padded = SequenceCrossEntropy(ignore_index=-100)
    assert padded.correct(logits, torch.tensor([[1, 1, -100, -100]])).tolist() == [0.5]
    assert BinaryCrossEntropy().correct(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 1.0]])).tolist() == [
        0.5
    ]
    near = SquaredError(tolerance=0.1).correct(torch.tensor([[1.05, 1.2]]), torch.ones(1, 2))
    assert near.tolist() == [0.5]
    one, bits = torch.tensor([[2.0], [2.0], [-2.0]]), torch.tensor([1, 0, 0])
    assert CrossEntropy().correct(one, bits).tolist() == [1.0, 0.0, 1.0]


def test_a_sample_of_padding_alone_has_no_loss_and_no_gradient() -> None:
    loss = SequenceCrossEntropy(ignore_index=-100)
    out = torch.randn(2, 3, 5, requires_grad=True)
    values = loss.each(out, torch.tensor([[-100, -100, -100], [1, 2, 3]]))
    values.sum().backward()
    assert values[0] == 0.0 and values[1] > 0.0
    assert out.grad is not None and not out.grad[0].any() and out.grad[1].any()


def test_a_loss_that_cannot_read_the_output_says_so() -> None:
    with pytest.raises(ModelError, match=r"CrossEntropy reads \(classes,\).*gives \(\)"):
        CrossEntropy().label(TensorSpec(()))
    with pytest.raises(ModelError, match=r"CausalLM reads .* two tokens at least per sample.*gives \(1, 4\)"):
        CausalLM().label(TensorSpec((1, 4)))
    with pytest.raises(ModelError, match=r"Quantile reads \(\.\.\., 3\) numbers"):
        Quantile(levels=(0.1, 0.5, 0.9)).label(TensorSpec((2,)))
    with pytest.raises(ModelError, match=r"NTXent reads \(2, features\), the embeddings of two views"):
        NTXent().label(TensorSpec((3, 8)))
    with pytest.raises(ModelError, match=r"CTC reads \(times, symbols\).*blank 5"):
        CTC(length=2, blank=5).label(TensorSpec((3, 5)))
    with pytest.raises(ModelError, match=r"SequenceCrossEntropy reads \(tokens, vocabulary\)"):
        SequenceCrossEntropy().label(TensorSpec((3,)))
    with refuses(ModelError, label_smoothing=1.5):
        CrossEntropy(label_smoothing=1.5)


@pytest.mark.parametrize("name", CASES)
def test_an_algorithm_trains_and_evaluates_with_any_loss(name: str) -> None:
    loss, shape, _ = CASES[name]
    torch.manual_seed(0)
    module = sequential([("first", nn.Linear(3, shape[-1])), ("head", nn.Linear(shape[-1], shape[-1]))])
    spec = ModelSpec("small", module, TensorSpec((*shape[:-1], 3)), 2, loss=loss)
    algorithm = algorithms.build("sgd", Objective(spec.module, spec.sample, spec.loss), batch=4, lr=0.1)
    step, losses = algorithm.phases[0].function, []
    assert step.inputs["batch.0.y"] == spec.label.rows(4)

    example = step.example(0) | {"hyper.lr": torch.tensor(0.1)}
    for _ in range(20):
        out = step(example)
        losses.append(float(out["metric.loss"]))
        example |= {key: value for key, value in out.items() if key.startswith("state.")}
    assert losses[-1] < losses[0]

    held_out = algorithm.evaluate.example(0) | {"batch.0.mask": torch.ones(4)}
    assert 0.0 <= algorithm.evaluate(held_out)["metric.correct"] <= 4.0


# -- means over a batch as torch's, labels that count for nothing ------------------------------------------


IGNORED = -100


def labelled(shape: tuple[int, ...], below: int, ignored: int, share: float = 0.4) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(0, below, (6, *shape), generator=generator)
    return torch.where(torch.rand(y.shape, generator=generator) < share, torch.full_like(y, ignored), y)


def _tokens(out: Tensor, y: Tensor, **options: float) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y, ignore_index=IGNORED, **options)  # type: ignore[arg-type]


MEANS: dict[str, tuple[Loss, tuple[int, ...], tuple[int, ...], int, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes": (
        CrossEntropy(ignore_index=IGNORED),
        (5,),
        (),
        IGNORED,
        lambda out, y: F.cross_entropy(out, y, ignore_index=IGNORED),
    ),
    "pixels": (
        CrossEntropy(ignore_index=255, label_smoothing=0.1),
        (5, 3, 4),
        (3, 4),
        255,
        lambda out, y: F.cross_entropy(out, y, ignore_index=255, label_smoothing=0.1),
    ),
    "tokens": (SequenceCrossEntropy(ignore_index=IGNORED), (7, 5), (7,), IGNORED, _tokens),
    "smoothed tokens": (
        SequenceCrossEntropy(ignore_index=IGNORED, label_smoothing=0.2),
        (7, 5),
        (7,),
        IGNORED,
        lambda out, y: _tokens(out, y, label_smoothing=0.2),
    ),
    "next tokens": (CausalLM(), (7, 5), (7,), IGNORED, lambda out, y: _tokens(out[:, :-1], y[:, 1:])),
}


@pytest.mark.parametrize("name", MEANS)
def test_ignored_labels_give_torch_s_mean_and_gradient(name: str) -> None:
    loss, output, label, ignored, reference = MEANS[name]
    out = torch.randn(6, *output, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = labelled(label, 5, ignored)

    def derived(mean: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaf = out.clone().requires_grad_()
        value = mean(leaf)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    found = derived(lambda leaf: batch_mean(loss, loss.each(leaf, y), y))
    for one, other in zip(found, derived(lambda leaf: reference(leaf, y)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert loss.label(TensorSpec(output)) == TensorSpec(label, torch.int64, 5, ignored)


def test_a_batch_of_labels_that_do_not_count_has_no_loss_and_no_gradient() -> None:
    loss, out = CrossEntropy(ignore_index=IGNORED), torch.randn(3, 4, requires_grad=True)
    y = torch.full((3,), IGNORED)
    batch_mean(loss, loss.each(out, y), y).backward()
    assert out.grad is not None and not out.grad.any()


def ports_of(
    name: str, loss: Loss
) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    module = sequential([("head", nn.Linear(3, 5))])
    algorithm = algorithms.build(name, Objective(module, TensorSpec((7, 3)), loss), batch=4)
    step = next(phase.function for each in algorithm.exchanges for phase in each.phases if phase.over_data)
    return step.example(3), step


@pytest.mark.parametrize("loss", [SequenceCrossEntropy(), CausalLM()], ids=str)
def test_the_gradient_of_all_data_weighs_tokens_and_omits_padding_rows(loss: Loss) -> None:
    example, step = ports_of("mimelite", loss)
    example["batch.0.mask"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    example = {
        key: torch.zeros_like(v) if key.startswith(("state.full", "state.seen")) else v
        for key, v in example.items()
    }
    x, y = example["batch.0.x"][:3], example["batch.0.y"][:3]
    weight = example["state.weights.head.weight"].clone().requires_grad_()
    out = x @ weight.T + example["state.weights.head.bias"]
    batch_mean(loss, loss.each(out, y), y).backward()

    found = step(example)

    mean = found["state.full.head.weight"] / found["state.seen"]
    torch.testing.assert_close(mean, weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["metric.loss"], batch_mean(loss, loss.each(out, y), y).detach())


def test_random_labels_of_a_port_are_sometimes_ignored() -> None:
    example, _ = ports_of("mimelite", CausalLM())
    y = example["batch.0.y"]
    assert (y == IGNORED).any() and (y[y != IGNORED] >= 0).all() and (y < 5).all()


def logits_of(path: list[int], symbols: int = 4) -> Tensor:
    return F.one_hot(torch.tensor([path]), symbols).float() * 9.0


@pytest.mark.parametrize(
    ("path", "text", "right"),
    [
        ([1, 1, 0, 2, 0, 2], [1, 2, 2], True),
        ([1, 2, 2, 2, 0, 0], [1, 2, 2], False),
        ([0, 1, 0, 0, 0, 0], [1, 0, 0], True),
        ([0, 1, 0, 2, 0, 3], [1, 2, 0], False),
        ([1, 0, 2, 0, 3, 1], [1, 2, 3], False),
        ([0, 0, 0, 0, 0, 0], [0, 0, 0], True),
        ([0, 1, 0, 3, 0, 0], [1, 2, 0], False),
    ],
)
def test_a_text_is_right_by_its_likeliest_symbols(path: list[int], text: list[int], right: bool) -> None:
    assert CTC(length=3).correct(logits_of(path), torch.tensor([text])).tolist() == [float(right)]


def test_a_text_that_needs_more_times_than_there_are_counts_for_nothing() -> None:
    out = torch.randn(2, 3, 4, requires_grad=True)
    values = CTC(length=3).each(out, torch.tensor([[2, 2, 2], [1, 2, 3]]))
    values.sum().backward()
    assert values[0] == 0.0 and values[1] > 0.0
    assert out.grad is not None and out.grad.isfinite().all() and not out.grad[0].any()


def test_masked_loss_sees_the_classes_of_pixels_and_of_next_tokens() -> None:
    counts = torch.tensor([3, 0, 1])
    pixels, tokens = torch.randn(2, 3, 4, 4), torch.randn(2, 5, 3)
    masked = without_absent(CrossEntropy(), pixels, counts)
    assert masked.shape == pixels.shape and not masked[:, 1].any()
    assert torch.equal(masked[:, [0, 2]], pixels[:, [0, 2]])
    assert not without_absent(CausalLM(), tokens, counts)[..., 1].any()
    objective = Objective(
        sequential([("head", nn.Conv2d(1, 3, 1))]), TensorSpec((1, 4, 4)), CrossEntropy(), masked=True
    )
    step = algorithms.build("sgd", objective, batch=2).phases[0].function
    example = step.example(0) | {"data.class_counts": counts}
    example["batch.0.y"] = example["batch.0.y"].clamp(max=0)
    assert float(step(example)["metric.loss"]) > 0.0


@pytest.mark.parametrize("loss", [Huber(), CTC(length=2)], ids=str)
def test_masked_loss_and_distillation_refuse_what_has_no_classes_by_name(loss: Loss) -> None:
    module, sample = sequential([("head", nn.Linear(3, 4))]), TensorSpec((6, 3))
    for options in ({"masked": True}, {"distilled": SelfDistillation()}):
        with pytest.raises(ModelError, match=f"need logits of classes, and {type(loss).__name__} reads none"):
            Objective(module, sample, loss, **options)  # type: ignore[arg-type]
