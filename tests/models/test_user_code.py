"""Errors of user code: whose code a line is, and remedies for what no graph has."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgefl
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import EdgeflError
from edgefl.models import user_code


def test_torch_behind_a_link_is_no_code_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "site-packages"
    link.symlink_to(Path(torch.__file__).parents[1])
    monkeypatch.setattr(torch.__spec__, "origin", str(link / "torch" / "__init__.py"))
    monkeypatch.setattr(user_code, "_ours", runpy.run_path(user_code.__file__)["_ours"])

    assert not user_code.is_user_code(link / "torch" / "functional.py")
    assert not user_code.is_user_code(Path(torch.functional.__file__))
    assert user_code.is_user_code(Path(__file__))


class Slope(nn.Module):
    """Computes a gradient in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h + torch.autograd.grad(h.sum(), h, create_graph=True)[0])


class Energy(Slope):
    """Computes the gradient of its input in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.a(x).square().sum()
            return self.b(torch.autograd.grad(energy, x, create_graph=True)[0])


@pytest.mark.parametrize("kind", [Slope, Energy])
def test_a_gradient_in_forward_is_refused_with_what_to_call_instead(kind: type[Slope]) -> None:
    with pytest.raises(EdgeflError, match=r"found a gradient computed .* torch\.func\.vjp") as refused:
        edgefl.compile(edgefl.Model(kind(), sample=TensorSpec((3,)), classes=3))

    assert "test_user_code.py" in refused.value.message


def test_ctc_of_torch_is_refused_with_the_loss_to_use() -> None:
    def ctc(out: Tensor, y: Tensor) -> Tensor:
        times, lengths = torch.full((len(out),), 6), torch.full((len(out),), 2)
        return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), y, times, lengths)

    loss = edgefl.losses.own_loss(ctc, labels=TensorSpec((2,), torch.int64, below=5))
    with pytest.raises(EdgeflError, match=r"edgefl\.losses\.CTC\(length\)"):
        edgefl.compile(
            edgefl.Model(nn.Linear(8, 5), sample=TensorSpec((6, 8)), classes=5),
            training=edgefl.Training(loss=loss),
        )
