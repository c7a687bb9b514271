"""Random numbers of training by torch, from a stream of each step, so that the graph gets the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.torch_functions.control_flow import SinglePathMode
from edgefl.models.torch_functions.random_inputs import call_with_draws
from edgefl.models.torch_functions.random_ops import Draw, drop_entries
from edgefl.models.user_code import at_line

LAYERS: Mapping[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
"""Functions of torch by name."""


def layer_by_layer(layer: Callable[..., Any], draw: Draw, *args: Any) -> Any:
    """Run stacked recurrent layers of torch one by one, with dropout between them whose numbers come from ``draw``.

    Args:
        layer: torch function of the layers, such as ``torch.lstm``.
        draw: function that returns uniform random numbers of a shape.
        args: arguments of ``layer``.

    Returns:
        The result of ``layer``, or NotImplemented if there is no dropout.
    """
    packed = (
        isinstance(args[1], Tensor)
        and args[1].dim() == 1
        and len(args) == 9
        and not isinstance(args[2], bool)
    )
    packed = packed and isinstance(args[3], list | tuple)
    if packed:
        data, batch_sizes, state, weights, biases, layers, rate, training, both = args
        lead: tuple[Any, ...] = (batch_sizes,)
        last: tuple[Any, ...] = ()
    else:
        data, state, weights, biases, layers, rate, training, both, batch_first = args
        data, lead, last = data.transpose(0, 1) if batch_first else data, (), (False,)
    if not training or not rate or layers == 1:
        return NotImplemented
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    ends = 2 if both else 1
    count = len(weights) // layers
    finals: list[tuple[Tensor, ...]] = []
    for number in range(layers):
        data = drop_entries(draw, data, rate) if number else data
        own = weights[number * count : (number + 1) * count]
        first = tuple(each[number * ends : (number + 1) * ends] for each in states)
        given = first[0] if isinstance(state, Tensor) else first
        data, *final = layer(data, *lead, given, own, biases, 1, 0.0, training, both, *last)
        finals.append(tuple(final))
    out = data.transpose(0, 1) if not packed and batch_first else data
    return out, *(torch.cat(each) for each in zip(*finals, strict=True))


class RandomStream:
    """Generator of the uniform random numbers of one training step, from the seed ``seed``.

    The attribute ``drawn`` has the numbers of all draws so far, in their order.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.drawn: list[Tensor] = []

    def __call__(self, shape: Sequence[int]) -> Tensor:
        # In float64 torch draws other numbers.
        with torch._C.DisableTorchFunction():
            numbers = torch.rand(tuple(shape), generator=self._generator, dtype=torch.float32)
        if torch._C._functorch.is_batchedtensor(numbers):
            raise ModelError(
                f"the model draws numbers for each sample inside of torch.vmap{at_line()}: expected numbers that all "
                "samples share (randomness='same'), or draws outside of it; draw them for all samples before, and map over "
                "them by in_dims",
                refused=True,
                vmap=True,
            )
        self.drawn.append(numbers)
        return numbers

    def ports(self, ports: Mapping[str, TensorSpec]) -> Tensors:
        """Return random numbers for the draws of another run, by the names in ``ports``.

        Draws are matched with the recorded ones in order, by sequences of equal shapes. A draw without a match gets
        new numbers.

        Args:
            ports: shape of each draw of the other run by name, in order.
        """
        mine = [tuple(each.shape) for each in self.drawn]
        others = [spec.shape for spec in ports.values()]
        known: dict[int, Tensor] = {}
        for here, there, length in SequenceMatcher(None, mine, others, autojunk=False).get_matching_blocks():
            known |= {there + at: self.drawn[here + at] for at in range(length)}
        return {
            name: known[at] if at in known else torch.rand(spec.shape, generator=self._generator)
            for at, (name, spec) in enumerate(ports.items())
        }


class GeneratorStates:
    """Recorder of the states of torch's generators at the draws of a training, to detect that a module seeds them.

    Attributes:
        is_seeded: True if a draw started from another state than the previous draw left.
    """

    def __init__(self) -> None:
        self.is_seeded = False
        self._seen: set[bytes] = set()
        self._next: dict[torch.Generator, bytes] = {}
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1

    def move(self, generator: torch.Generator) -> None:
        """Advance ``generator`` as by a draw, and record its state.

        Raises:
            ModelError: if it was in the state of an earlier draw and would repeat numbers.
        """
        with torch._C.DisableTorchFunction():
            state = generator.get_state().numpy().tobytes()
            torch.rand((), generator=generator)
            after = generator.get_state().numpy().tobytes()
        if state in self._seen:
            raise ModelError(
                f"the model draws numbers that it drew before{at_line()}: its generator is set to the same state again "
                "(manual_seed, set_state, fork_rng, or a torch.Generator made in forward), and a device draws new numbers "
                "for each draw. Draw them once in __init__ and keep them by register_buffer, or use one result twice; for "
                "new numbers in each step leave the generator alone in forward",
                refused=True,
                repeated=True,
            )
        self.is_seeded |= self._next.get(generator, state if self._step <= 1 else None) != state
        self._seen.add(state)
        self._next[generator] = after


class RandomDrawMode(SinglePathMode):
    """Mode in which torch's functions run unchanged, but take their random numbers from ``draw``.

    Args:
        draw: function that returns uniform numbers of a shape.
        generators: recorder of generator states over all steps of the training.

    Raises:
        ModelError: if torch would draw the same numbers a second time.
    """

    def __init__(self, draw: Draw, generators: GeneratorStates | None = None) -> None:
        super().__init__()
        self._draw = draw
        self._generators = generators or GeneratorStates()
        self._generators.begin_step()

    def _called(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
        draw = partial(self._numbers, next(given, torch.default_generator))
        if name in LAYERS:
            result = layer_by_layer(LAYERS[name], draw, *args)
            return func(*args, **kwargs) if result is NotImplemented else result
        return call_with_draws(self, draw, func, args, kwargs)

    def _numbers(self, generator: torch.Generator, shape: Sequence[int]) -> Tensor:
        self._generators.move(generator)
        return self._draw(shape)
