"""Values that are the same for every input are known while a model is traced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.split import split
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.objective.objective import Objective
from edgefl_export.capture.graph import graph_of
from edgefl_export.capture.trace import capture


class Solver(nn.Module):
    """Times as a solver of differential equations asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.field, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for t in torch.linspace(0, 1, 4).tolist():
            y = y + 0.25 * torch.tanh(self.field(y + t))
        return self.head(y)


class Spans(nn.Module):
    """A span in a tensor, as DeBERTa has it, beside writes that have nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(20, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        span = torch.ceil(torch.tensor(x.size(1) / 2, dtype=torch.float)).long()
        x = x.clone()
        x += 1
        rows = self.table[10 - span : 10 + span]
        places = torch.clamp(torch.arange(x.size(1)) + span, 0, span * 2 - 1)
        return self.head(F.relu(x @ rows[places]))


class Decoder(nn.Module):
    """torch's layer asks whether its mask is the causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.head(self.decoder(x, x, tgt_mask=mask).mean(1))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("module", "shape"),
    [(Solver(), (4,)), (Spans(), (8,)), (Decoder(), (5, 8))],
    ids=lambda each: str(each)[:6],
)
def test_units_compute_what_the_module_does(module: nn.Module, shape: tuple[int, ...]) -> None:
    spec, x = split(module, sample=TensorSpec(shape), classes=3), torch.randn(6, *shape)

    torch.testing.assert_close(spec.module.eval()(x), module.eval()(x))


def test_a_gradient_may_be_taken_of_writes_beside_what_is_known() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spec = split(nn.Sequential(OrderedDict(whole=Spans())), sample=TensorSpec((8,)), classes=3)
    step = sgd(Objective(spec.module, spec.sample), batch=4).phases[0].function
    given = step.example(0)

    torch.testing.assert_close(capture(step)(given), step(given))


def test_what_was_written_to_is_known_no_more() -> None:
    with TraceableMode(), torch.device("meta"):
        mask = torch.zeros(3, 3)
        row, other = mask[0], torch.ones(2)
        other[0] = 5
        assert other.tolist() == [5, 1] and row.tolist() == [0, 0, 0]
        mask[0, 0] = torch.empty(())

        with pytest.raises(RuntimeError, match="meta"):
            row.tolist()
        assert other.tolist() == [5, 1]


def test_a_value_that_depends_on_the_input_is_refused_with_its_line() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > torch.tensor(0.0) else x

    with pytest.raises(ModelError, match=r"test_known\.py"):
        split(nn.Sequential(nn.Linear(3, 3), Asks()), "auto", sample=TensorSpec((3,)), classes=3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda known: torch.multinomial(known, 1).item(),
        lambda known: torch.poisson(known).sum().item(),
        lambda known: known.clone().geometric_(0.5)[0].item(),
        lambda known: torch.randint_like(known, 9).max().item(),
    ],
)
def test_what_is_drawn_is_not_known(draw: Callable[[Tensor], object]) -> None:
    with TraceableMode(), torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        draw(torch.tensor([0.5, 0.5]))

    with pytest.raises(RuntimeError, match="out of a tracing tensor"):
        graph_of(
            lambda x: (x * torch.tensor(draw(torch.tensor([0.5, 0.5]))),), (torch.ones(2),), {}, fake=False
        )


def test_what_a_call_failed_to_write_is_known_no_more() -> None:
    with TraceableMode(), torch.device("meta"):
        known = torch.ones(2)
        known.random_(0, 9)
        with pytest.raises(RuntimeError, match="meta"):
            known.tolist()
