"""What the clients of an exchange run: its functions, each recorded once as a list of operations, for one or for many.

Autograd is gone from a recording: it holds forward, backward and update as they ran. For many clients it is the same list
with the clients in front of every tensor that is a client's own (:func:`torch.func.vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgefl.contract.program import Function
from edgefl.contract.tensors import Tensors, role_of
from edgefl.simulator.operations.calls import compiled
from edgefl.simulator.operations.folding import fold
from edgefl.simulator.operations.layout import channels_last, large_first
from edgefl.simulator.operations.pooling import pool_first
from edgefl.simulator.operations.updates import fuse, in_place, own_results
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.errors import ConfigError
from edgefl.wire.tensors import Array
from exporters.bundle.features import FEATURES, features_of
from exporters.capture.graph import Table, graph_of
from exporters.capture.trace import capture
from exporters.front.tier import Exchange, Tier

_COMMON = frozenset({"weights", "hyper"})
"""Roles that are the same for all clients of a round; of all others each client has its own."""

_IMAGES = frozenset({"batch", "noise"})
_AS_THEY_RAN: Table = {}
"""Torch's own operations, none rewritten for an engine of devices."""
_HERE = torch.device("cpu")

Recorded = Callable[[Mapping[str, Tensor]], Tensors]
"""Inputs by port -> outputs by port. For many clients, all but weights and scalars have these in front."""


@dataclass
class Functions:
    """The functions of one exchange of a tier, by the names that graphs have in the manifest of its ``bundle``, which holds
    none of them."""

    bundle: Bundle
    named: Mapping[str, Function]
    _recorded: dict[tuple[str, int], Recorded] = field(default_factory=dict)

    @classmethod
    def of(cls, tier: Tier, exchange: Exchange, bundle: Bundle) -> Functions:
        manifest = bundle.manifest
        named = {function.name: function for function in exchange.program.functions}
        named |= {
            chunk.graph: prefix.forward for chunk, prefix in zip(manifest.prefix, tier.prefix, strict=True)
        }
        features = features_of(manifest.data)
        return cls(bundle, named if features is None else named | {FEATURES: features})

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    def blob(self, ref: BlobRef) -> bytes:
        """What texts are read by."""
        return self.bundle.blobs[ref.sha256]

    def features(self, name: str) -> Callable[[Array], Array]:
        """What makes a sample of what a file holds."""
        run = self.recorded(name, 1)
        return lambda rows: run({"batch.0.x": torch.from_numpy(rows)})["record.x"].numpy()

    def recorded(self, name: str, clients: int) -> Recorded:
        """The function ``name`` for so many clients at once; 1: for one, without a dimension of clients."""
        key = name, clients
        if key not in self._recorded:
            self._recorded[key] = recorded(self.named[name], clients)
        return self._recorded[key]


def recorded(function: Function, clients: int) -> Recorded:
    """``function`` as a list of operations. Inputs of the role ``state`` that it replaces are given up: their memory is
    written to."""
    captured = capture(function, _AS_THEY_RAN)
    inputs, outputs, module = tuple(captured.inputs), tuple(captured.outputs), captured.module
    fold(module, _HERE)
    fuse(module)
    if clients > 1:
        module = _for_many(function, inputs, module, clients)
        fold(module, _HERE)
        fuse(module)
    else:
        pool_first(module)
        channels_last(module, [role_of(name) in _IMAGES for name in inputs])
        large_first(module)
    own_results(module, [role_of(name) == "state" for name in outputs])
    in_place(module, _replaced(inputs, outputs))
    call = compiled(module)

    def run(given: Mapping[str, Tensor]) -> Tensors:
        with torch.no_grad():
            results = call(*[given[name] for name in inputs])
        return dict(zip(outputs, results, strict=True))

    return run


def _replaced(inputs: Sequence[str], outputs: Sequence[str]) -> dict[int, int]:
    """Numbers of the inputs that are state, and those of the outputs in their place."""
    return {
        place: outputs.index(name)
        for place, name in enumerate(inputs)
        if role_of(name) == "state" and name in outputs
    }


def _for_many(
    function: Function, inputs: Sequence[str], module: torch.fx.GraphModule, clients: int
) -> torch.fx.GraphModule:
    """``module`` with the clients in front of all that is a client's own."""
    common = [role_of(name) in _COMMON for name in inputs]
    specs = [function.inputs[name] for name in inputs]

    def mapped(*given: Tensor) -> tuple[Tensor, ...]:
        # A number for each client, so that a function which reads nothing of its own has clients, too.
        def one(_client: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
            return tuple(module(*own))

        axes = (0, *(None if each else 0 for each in common))
        return tuple(torch.func.vmap(one, in_dims=axes)(torch.arange(clients), *given))

    example = [
        torch.zeros(spec.shape if shared else (clients, *spec.shape), dtype=spec.dtype)
        for spec, shared in zip(specs, common, strict=True)
    ]
    try:
        return graph_of(mapped, example, _AS_THEY_RAN, fake=True)
    except Exception as error:  # vmap knows not every op, and says so by many classes
        raise ConfigError(
            f"function {function.name!r} cannot run for {clients} clients together: {error}; set simulation.together = 1"
        ) from error
