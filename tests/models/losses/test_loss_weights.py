"""Means over a batch as torch's, labels that count for nothing, and texts of CTC."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses import CTC, CausalLM, CrossEntropy, Huber, Loss, SequenceCrossEntropy
from edgefl.models.losses.loss import batch_mean, without_absent
from edgefl.models.spec import sequential
from edgefl.objective.objective import Objective, SelfDistillation

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
