"""Packed sequences of a graph compute what torch's do."""

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
from edgefl.models.split import split
from edgefl.models.torch_functions.control_flow import TraceableMode
from edgefl.models.torch_functions.recurrent import PaddedSequence, padding

E, H, T = 5, 4, 7
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
def test_outputs_and_gradients_equal_torchs(kind: Any, layers: int, both: bool, given: bool) -> None:
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
        self.embedding, self.lstm = nn.Embedding(9, E), nn.LSTM(E, H, batch_first=True, bidirectional=True)
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
