"""What the clients of an exchange run: its functions, each recorded once as a list of operations, for one or for many.

Autograd is gone from a recording: it holds forward, backward and update as they ran. For many clients it is the same list
with the clients in front of every tensor that is a client's own (:func:`torch.func.vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl.contract.program import Function
from edgefl.contract.tensors import Tensors, role_of
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.errors import ConfigError
from edgefl.wire.tensors import Array
from exporters.bundle.features import FEATURES, features_of
from exporters.capture.trace import joint_graph
from exporters.front.tier import Exchange, Tier

_COMMON = frozenset({"weights", "hyper"})
"""Roles that are the same for all clients of a round; of all others each client has its own."""

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
    """``function`` as a list of operations. Inputs that are not given are those that nothing depends on: zeros."""
    joint = joint_graph(function)
    module, outputs = joint.module, tuple(joint.outputs)
    # Zeros, expanded: what nobody reads takes no memory.
    fill = {
        name: torch.zeros((), dtype=spec.dtype).expand(spec.shape) for name, spec in function.inputs.items()
    }
    if clients > 1:
        module = _for_many(
            function.name, module, [role_of(name) in _COMMON for name in fill], list(fill.values()), clients
        )
        fill = {
            name: each if role_of(name) in _COMMON else each.expand(clients, *each.shape)
            for name, each in fill.items()
        }
    module.graph.eliminate_dead_code()
    module.recompile()
    index = (torch.arange(clients),) if clients > 1 else ()

    def run(given: Mapping[str, Tensor]) -> Tensors:
        with torch.no_grad():
            results = module(*index, *(given.get(name, fill[name]) for name in fill))
        return dict(zip(outputs, results, strict=True))

    return run


def _for_many(
    name: str, module: torch.fx.GraphModule, common: Sequence[bool], arguments: Sequence[Tensor], clients: int
) -> torch.fx.GraphModule:
    # A number for each client, so that a function which reads nothing of its own has clients, too.
    def flat(_client: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(*given))

    mapped = torch.func.vmap(flat, in_dims=(0, *(None if each else 0 for each in common)))
    example = [
        each.clone() if shared else each.expand(clients, *each.shape).clone()
        for each, shared in zip(arguments, common, strict=True)
    ]
    try:
        made: torch.fx.GraphModule = make_fx(mapped)(torch.arange(clients), *example)
    except Exception as error:  # vmap knows not every op, and says so by many classes
        raise ConfigError(
            f"function {name!r} cannot run for {clients} clients together: {error}; set simulation.together = 1"
        ) from error
    return made
