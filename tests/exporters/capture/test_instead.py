"""Ops that no engine can run are refused by name, with the user's line and with what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.errors import ExportError
from tests.exporters.engines import ENGINES, function_of, on_engine

SQUARE = torch.tensor([[2.0, 1, 0], [0.3, -3, 1], [1, 0.2, 1]])


def sampled(x: Tensor) -> Tensor:
    image = x.reshape(1, 1, 3, 3)
    grid = (x.reshape(-1)[:8].reshape(1, 2, 2, 2) * 0.2).tanh()
    return F.grid_sample(image, grid, align_corners=False)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "grid_sampler_2d_backward": (sampled, "gather"),
    "lgamma": (lambda x: torch.lgamma(x.abs() + 1), "Stirling"),
    "_linalg_slogdet": (lambda x: torch.linalg.slogdet(x @ x.T)[1], "diagonal"),
    "_linalg_det": (torch.linalg.det, "diagonal"),
    "linalg_matrix_exp": (torch.linalg.matrix_exp, "series"),
    "linalg_inv_ex": (torch.linalg.inv, "factors"),
    "special_log_ndtr": (torch.special.log_ndtr, "erfc"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("op", REFUSED)
def test_a_refusal_names_the_op_the_line_and_what_to_write(op: str, engine: str) -> None:
    fn, remedy = REFUSED[op]

    with pytest.raises(ExportError) as refused:
        on_engine(engine, function_of(fn, (SQUARE,), gradients=True), (SQUARE,))

    text = str(refused.value)
    assert op in text and remedy in text
    assert "test_instead.py" in text or "engines.py" in text


def test_the_gradient_of_an_embedding_with_max_norm_on_executorch() -> None:
    places = torch.tensor([0, 2])

    def limited(x: Tensor) -> Tensor:
        return F.embedding(places, x.clone(), max_norm=1.0)

    with pytest.raises(ExportError, match="divide the rows"):
        on_engine("executorch", function_of(limited, (SQUARE,)), (SQUARE,))
