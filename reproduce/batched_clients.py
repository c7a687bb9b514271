"""Many clients in one call, for small problems with thousands of rounds, whose calls cost more than the arithmetic."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select

_aten = torch.ops.aten
_SAME_VALUE = frozenset({_aten.alias.default, _aten.detach.default, _aten.clone.default})
_COMMON = frozenset({"weights", "hyper"})
"""Roles that all clients share. Inputs of all other roles differ per client."""


def together(algorithm: Algorithm, clients: int) -> Algorithm:
    """Return ``algorithm`` for ONE client that represents ``clients`` of them, all of which take part in every exchange.

    Its own tensors (carry, state, batches, noise) have a leading client dimension, (clients, *shape). The update is their
    plain mean, without metrics. Each function is vectorised and recorded once as a list of operations in float64, without
    autograd.

    Raises:
        ValueError: The algorithm passes over the data, whose length may differ per client.
    """
    if any(phase.over_data for phase in algorithm.phases):
        raise ValueError(f"{algorithm.name} passes over the data of each client; simulate its clients apart")
    apart, unfold = _vectorised(algorithm.finish, clients).fn, algorithm.server.unfold

    def finish(given: Tensors) -> Tensors:
        out = apart(given)
        sent = torch.func.vmap(unfold)(select(out, "update"))
        rest = {name: tensor for name, tensor in out.items() if role_of(name) != "update"}
        return rest | prefixed("update", {name: tensor.mean(0) for name, tensor in sent.items()})

    def each(function: Function) -> Function:
        return _recorded(_vectorised(function, clients), clients)

    return replace(
        algorithm,
        start=each(algorithm.start),
        phases=tuple(replace(phase, function=each(phase.function)) for phase in algorithm.phases),
        finish=_recorded(replace(algorithm.finish, fn=finish), clients),
        server=replace(algorithm.server, unfold=lambda update: update),
        opening=tuple(together(exchange, clients) for exchange in algorithm.opening),
        ahead=tuple(together(exchange, clients) for exchange in algorithm.ahead),
    )


def _vectorised(function: Function, clients: int) -> Function:
    places = {name: None if role_of(name) == "hyper" else 0 for name in function.inputs}
    mapped = torch.func.vmap(function.fn, in_dims=(places,))

    def fn(given: Tensors) -> Tensors:
        # Weights too, so that what starts from nothing but them has clients.
        return mapped(
            {n: t.expand(clients, *t.shape) if role_of(n) == "weights" else t for n, t in given.items()}
        )

    return replace(function, fn=fn)


def _recorded(function: Function, clients: int) -> Function:
    ports = {name: _stacked(name, spec, clients) for name, spec in function.inputs.items()}
    outputs: list[str] = []

    def flat(*arguments: Tensor) -> tuple[Tensor, ...]:
        out = function.fn(dict(zip(ports, arguments, strict=True)))
        out = {name: tensor for name, tensor in out.items() if role_of(name) != "metric"}
        outputs[:] = out
        return tuple(out.values())

    graph = make_fx(flat)(*(spec.zeros() for spec in ports.values()))
    for node in graph.graph.nodes:
        if node.target in _SAME_VALUE:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()

    def fn(given: Tensors) -> Tensors:
        with torch.no_grad():
            return dict(zip(outputs, graph(*(given[name] for name in ports)), strict=True))

    return replace(function, fn=fn, inputs=ports)


def _stacked(name: str, spec: TensorSpec, clients: int) -> TensorSpec:
    shape = spec.shape if role_of(name) in _COMMON else (clients, *spec.shape)
    return TensorSpec(shape, torch.float64 if spec.dtype.is_floating_point else spec.dtype, spec.below)
