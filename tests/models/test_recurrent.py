"""LSTM and GRU stacks compute what torch's do, in float64, and work wherever torch's would."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from edgefl.contract.tensors import TensorSpec
from edgefl.models.inputs import call_with_inputs
from edgefl.models.layers.recurrent import Gru, Lstm, LstmDirection, Stack
from edgefl.models.split import split
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.models.torch_functions.random_inputs import RandomInputMode
from edgefl.models.torch_functions.recurrent import PaddedSequence, padding
from tests.support.errors import ModelError, refuses

E, H, B, T = 5, 4, 3, 7
PAIRS: list[tuple[Any, Any]] = [(nn.LSTM, Lstm), (nn.GRU, Gru)]
SHAPES = list(product(PAIRS, (1, 2, 3), (False, True)))


def _pair(kinds: tuple[Any, Any], layers: int, bidirectional: bool) -> tuple[nn.LSTM | nn.GRU, Stack]:
    torch.manual_seed(layers)
    theirs = kinds[0](E, H, layers, batch_first=True, bidirectional=bidirectional).double()
    ours = kinds[1](E, H, layers=layers, bidirectional=bidirectional).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _score(out: Tensor, state: tuple[Tensor, ...] = ()) -> Tensor:
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    return (weight * out).sin().sum() + sum(
        ((part * weight.mean()).cos().sum() for part in state), torch.zeros(())
    )


def _tuple(state: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


@pytest.mark.parametrize(("kinds", "layers", "bidirectional"), SHAPES)
def test_outputs_and_gradients_equal_torchs(kinds: tuple[Any, Any], layers: int, bidirectional: bool) -> None:
    theirs, ours = _pair(kinds, layers, bidirectional)
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    states = tuple(
        torch.randn(layers * (1 + bidirectional), B, H, dtype=torch.float64, requires_grad=True)
        for _ in range(2 if kinds[0] is nn.LSTM else 1)
    )

    expected, expected_state = theirs(x, states if len(states) > 1 else states[0])
    found, found_state = ours.run(x, states)

    torch.testing.assert_close(
        (found, found_state), (expected, _tuple(expected_state)), rtol=1e-9, atol=1e-12
    )
    wanted = torch.autograd.grad(_score(expected, _tuple(expected_state)), [x, *states, *theirs.parameters()])
    actual = torch.autograd.grad(_score(found, found_state), [x, *states, *ours.parameters()])
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kinds", PAIRS)
def test_torch_func_grad_and_vmap_agree_with_autograd(kinds: tuple[Any, Any]) -> None:
    _, ours = _pair(kinds, 2, True)
    x = torch.randn(2, B, T, E, dtype=torch.float64)
    clients = {
        name: torch.stack([value.detach(), value.detach() * 0.5]) for name, value in ours.named_parameters()
    }

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return _score(torch.func.functional_call(ours, parameters, (x,)))

    together = torch.func.vmap(torch.func.grad(loss))(clients, x)

    for k in range(2):
        leaves = {name: value[k].clone().requires_grad_() for name, value in clients.items()}
        alone = torch.autograd.grad(loss(leaves, x[k]), list(leaves.values()))
        torch.testing.assert_close([together[name][k] for name in leaves], list(alone))


def test_a_second_derivative_is_refused_with_a_reason() -> None:
    _, ours = _pair(PAIRS[0], 1, False)
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(_score(ours(x)), x, create_graph=True)

    with pytest.raises(ModelError, match="first derivatives only"):
        torch.autograd.grad(gradient.square().sum(), x)


class Tagger(nn.Module):
    """Somebody's module around a torch layer, which uses both results and states of its own."""

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        out, state = self.layer(x)
        again, _ = self.layer(x, state)
        return torch.cat([each.flatten() for each in (out, again, *_tuple(state))])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"num_layers": 2, "dropout": 0.5},
    {"num_layers": 2, "bidirectional": True},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *product((nn.LSTM, nn.GRU, nn.RNN), OPTIONS),
        *product((nn.RNN,), [{"nonlinearity": "relu", "num_layers": 3}]),
        *product(
            (nn.LSTM,),
            [{"proj_size": 3}, {"proj_size": 2, "bias": False, "num_layers": 2, "bidirectional": True}],
        ),
    ],
)
def test_torch_s_layers_compute_the_same_in_our_runs(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Tagger(kind(E, H, **options)).double().eval()
    x = torch.randn(T, T, E, dtype=torch.float64)
    leaves = list(module.parameters())

    wanted = module(x)
    with TraceableMode():
        found = module(x)

    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(_score(each), leaves) for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_one_sequence_alone_needs_no_batch() -> None:
    layer, x = nn.GRU(E, H), torch.randn(T, E)
    with TraceableMode():
        found = layer(x)
    torch.testing.assert_close(found, layer(x))


@pytest.mark.parametrize("kind", [Lstm, nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_acts_between_layers_and_reads_its_noise(kind: Any) -> None:
    reference = nn.LSTM if kind is Lstm else kind
    order = {} if kind is Lstm else {"batch_first": True}
    count = "layers" if kind is Lstm else "num_layers"
    layer = kind(E, H, **{count: 2}, dropout=0.5, bidirectional=True, **order)
    x, uniform = torch.randn(B, T, E), torch.rand(T, B, 2 * H)
    first, second = (reference(width, H, batch_first=True, bidirectional=True) for width in (E, 2 * H))
    state = layer.state_dict()
    first.load_state_dict({name: state[name] for name in first.state_dict()})
    second.load_state_dict({name: state[name.replace("l0", "l1")] for name in second.state_dict()})

    with RandomInputMode(uniform.view):
        found = layer(x)

    kept = torch.where(uniform.transpose(0, 1) >= 0.5, first(x)[0] * 2, 0.0)
    torch.testing.assert_close(found if kind is Lstm else found[0], second(kept)[0])


def test_a_direction_run_in_reverse_is_a_direction_that_reads_backwards() -> None:
    torch.manual_seed(0)
    cell = LstmDirection(E, H).double()
    for parameter in cell.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    words = torch.randn(B, T, E, dtype=torch.float64)
    state = (torch.randn(B, H, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64))

    torch.testing.assert_close(cell(words, state, reverse=True), cell(words.flip(1), state))


def test_what_no_stack_reads_is_refused_by_name() -> None:
    with refuses(ModelError, features=E, found=(T, E)):
        Gru(E, H)(torch.zeros(T, E))
    with refuses(ModelError, layers=0):
        Lstm(E, H, layers=0)


# -- packed sequences of a graph compute what torch's do ---------------------------------------------------


LENGTHS = torch.tensor([3, 7, 1, 6])


class Ends(nn.Module):
    """All that people take from a packed sequence."""

    def __init__(self, layer: nn.Module, *, batch_first: bool = True, given: bool = False) -> None:
        super().__init__()
        self.layer, self.batch_first, self.given = layer, batch_first, given

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        rows = self.layer.num_layers * (1 + self.layer.bidirectional)
        first: Any = torch.linspace(-1, 1, rows * len(lengths) * H, dtype=x.dtype).view(rows, -1, H)
        first = (first, first.cos()) if isinstance(self.layer, nn.LSTM) else first
        entries = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(entries, lengths.cpu(), self.batch_first, enforce_sorted=False)
        out, last = self.layer(packed, first) if self.given else self.layer(packed)
        whole, ends = pad_packed_sequence(out, self.batch_first, padding_value=0.5, total_length=T + 1)
        return (whole, ends.to(x.dtype), *(last if isinstance(last, tuple) else (last,)))


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("kind", "layers", "both", "given"),
    list(product((nn.LSTM, nn.GRU, nn.RNN), (1, 2), (False, True), (False, True))),
)
def test_packed_outputs_and_gradients_equal_torchs(kind: Any, layers: int, both: bool, given: bool) -> None:
    torch.manual_seed(layers)
    theirs = kind(E, H, layers, batch_first=True, bidirectional=both).double()
    x = torch.randn(4, T, E, dtype=torch.float64, requires_grad=True)

    wanted = Ends(theirs, given=given)(x, LENGTHS)
    with TraceableMode():
        found = Ends(theirs, given=given)(x, LENGTHS)

    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    scores = [sum((each * each.cos()).sum() for each in results) for results in (found, wanted)]
    gradients = [torch.autograd.grad(score, [x, *theirs.parameters()]) for score in scores]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_time_may_come_first() -> None:
    layer = nn.GRU(E, H)
    x = torch.randn(4, T, E)

    wanted = Ends(layer, batch_first=False)(x, LENGTHS)
    with TraceableMode():
        found = Ends(layer, batch_first=False)(x, LENGTHS)

    torch.testing.assert_close(found, wanted)


def test_packing_is_torch_s_outside_and_in_other_threads() -> None:
    made: list[Any] = []

    def pack() -> None:
        made.append(rnn.pack_padded_sequence(torch.randn(7, 4, E), LENGTHS, enforce_sorted=False))

    with padding():
        pack()
        thread = threading.Thread(target=pack)
        thread.start()
        thread.join()
    pack()

    assert [type(each) for each in made] == [PaddedSequence, PackedSequence, PackedSequence]
    assert torch.equal(pad_packed_sequence(made[2])[1], LENGTHS)


def test_sequences_longer_than_torch_s_give_a_warning() -> None:
    with (
        padding(),
        pytest.warns(UserWarning, match="cuts them to the longest of each batch: give total_length"),
    ):
        pad_packed_sequence(rnn.pack_padded_sequence(torch.randn(7, 4, E), LENGTHS, enforce_sorted=False))


class Texts(nn.Module):
    """Lengths are counted, and the cut may lie behind the recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = (nn.Embedding(9, E), nn.LSTM(E, H, batch_first=True, bidirectional=True))
        self.hidden, self.head = nn.Linear(2 * H, H), nn.Linear(H, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens > 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.to("cpu"), batch_first=True, enforce_sorted=False
        )
        _, (state, _) = self.lstm(packed)
        return self.head(torch.relu(self.hidden(torch.cat((state[0], state[1]), dim=1))))


@pytest.mark.slow
def test_a_model_is_cut_and_its_units_follow_the_lengths() -> None:
    model = Texts()
    spec = split(model, sample=TensorSpec((T,), torch.int64, 9), classes=3)
    x = torch.randint(1, 9, (4, T)) * (torch.arange(T) < LENGTHS.unsqueeze(1))

    assert len(spec.units) > 1
    torch.testing.assert_close(call_with_inputs(spec.module, {"x": x}), model(x))
    assert not torch.allclose(
        call_with_inputs(spec.module, {"x": x}), call_with_inputs(spec.module, {"x": x.clamp(min=1)})
    )


class Reader(nn.LSTM):
    """Reads packed sequences and others."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        out, last = super().forward(input, hx)
        return (out, last) if isinstance(input, PackedSequence) else (out.relu(), last)


def test_a_subclass_of_a_layer_runs_as_in_torch() -> None:
    layer, x = Reader(E, H, batch_first=True, proj_size=3), torch.randn(4, T, E)

    def read() -> Tensor:
        packed = rnn.pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
        out, (h, c) = layer(packed)
        assert isinstance(out, PackedSequence)
        whole, _ = pad_packed_sequence(out, batch_first=True, total_length=T)
        return torch.cat((whole.flatten(), h.flatten(), c.flatten(), layer(x)[0].flatten()))

    wanted = read()
    with TraceableMode():
        found = read()
    torch.testing.assert_close(found, wanted)
