"""Bounds on the memory of real devices (embracingfl.md 2.8), in elements: peaks of the frozen chunks and of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.spec import ModelSpec, without_values
from edgefl.models.tied import collect_state
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.submodel import FrozenUnits, Submodel
from reproduce.embracingfl.accounting import count


def live_elements(name: str, unit: nn.Module, sample: TensorSpec, batch: int) -> tuple[int, TensorSpec]:
    """Return (peak number of live activation elements of ``unit`` in inference for ``batch`` rows, spec of one output
    row).

    The unit is traced operation by operation on the meta device, and each value is freed after its last use. Weights
    are not activations. A view shares its base's memory, which is live until the last use of either. The input is
    live until its last use.

    Args:
        name: Name of the unit, for the error text.
        unit: Unit of a model.
        sample: Spec of one sample of its input.
        batch: Number of rows.

    Raises:
        ModelError: The unit does not return one tensor.
    """
    bare = copy_module(unit).to("meta").eval()
    x = torch.empty((batch, *sample.shape), dtype=sample.dtype, device="meta")
    with without_values(bare):
        # Above autograd: below it, kernels of the meta device that an earlier export has registered would be traced too.
        graph = make_fx(bare, pre_dispatch=True)(x).graph
    nodes = [node for node in graph.nodes if node.op in ("placeholder", "call_function")]
    output = next(node for node in graph.nodes if node.op == "output").args[0]
    result = output.meta["val"] if isinstance(output, fx.Node) else None
    if not isinstance(result, Tensor):
        raise ModelError(f"unit {name!r} must return one tensor", unit=name)
    return _peak(nodes, output), TensorSpec(tuple(result.shape[1:]), result.dtype)


def _peak(nodes: Sequence[fx.Node], output: fx.Node) -> int:
    order = {node: position for position, node in enumerate(nodes)}
    base: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = _source_of_view(node)
        base[node] = base.get(source, node) if source is not None else node
    death = dict.fromkeys(nodes, -1)
    for node in nodes:
        uses = [order[user] for user in node.users if user in order]
        death[base[node]] = max(death[base[node]], order[node], *uses)
    death[base[output]] = len(nodes)
    owners = [node for node in nodes if base[node] is node]
    return max(
        sum(_elements(node) for node in owners if order[node] <= moment <= death[node])
        for moment in range(len(nodes))
    )


def _source_of_view(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory ``node`` shares, or None if it has memory of its own.

    It is the input of an aliasing operation, or the tuple of which ``node`` is an element.
    """
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args[0]
    aliases = any(returned.alias_info is not None for returned in schema.returns)
    return node.args[0] if aliases else None


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return sum(item.numel() for item in values if isinstance(item, Tensor))


def m_forward(chunk: FrozenUnits, batch: int = 32) -> int:
    """Return the memory M_fwd(k) of the forward pass of a chunk of frozen units, in elements, without gradients.

    It is the chunk's weights plus the peak of live activations in one of its units. The weights include moving
    statistics, and tied weights that a later unit holds. ``batch`` is the number of rows.
    """
    weights: int = sum(tensor.numel() for tensor in collect_state(chunk.module).values())
    live, sample = 0, chunk.sample
    for name, unit in chunk.module.named_children():
        peak, sample = live_elements(name, unit, sample, batch)
        live = max(live, peak)
    return weights + live


def m_train(submodel: Submodel, batch: int = 32) -> int:
    """Return the memory of training in elements, M_train = 2 p + 2 a + p (momentum) + B * |boundary|, with B =
    ``batch``.

    p are the trained parameters, a the activations of B rows, and |boundary| the elements of one input row.
    """
    counted = count(submodel.suffix, submodel.boundary, batch)
    return counted.mem + counted.p + batch * elements(submodel.boundary)


def record(submodel: OutputSide, samples: int) -> int:
    """Return rec_i, the memory of recorded activations in elements, for ``samples`` rows.

    It is the largest record (result of a chunk of frozen units, kept for training), or the largest pair of records: a
    chunk's input and its result. Raw data are not a record, so a tier that trains all units has 0.
    """
    if not submodel.prefix:
        return 0
    pairs = [
        (elements(chunk.sample) if position else 0) + elements(chunk.result)
        for position, chunk in enumerate(submodel.prefix)
    ]
    return samples * max(elements(submodel.boundary), *pairs)


def m_peak(submodel: OutputSide, *, batch: int = 32, samples: int = 0, record_in_ram: bool = False) -> int:
    """Return the peak memory of a tier in elements, M_peak(i) = max(max_k M_fwd(k), M_train).

    Args:
        submodel: Submodel.
        batch: Rows of a batch.
        samples: Rows of the record: the activations that the frozen units computed for training.
        record_in_ram: True: add the record, which is kept in memory.
    """
    peaks = [m_forward(chunk, batch) for chunk in submodel.prefix]
    record_bytes = record(submodel, samples) if record_in_ram else 0
    return max([*peaks, m_train(submodel, batch)]) + record_bytes


def elements(spec: TensorSpec) -> int:
    """Return the number of elements of a tensor of the shape of ``spec``."""
    return math.prod(spec.shape)


def per_unit(spec: ModelSpec) -> Iterable[tuple[str, int, int]]:
    """Yield (unit name, parameters p, activations a per sample) for each unit: the tables of embracingfl.md 3.1 to 3.3."""
    for position, name in enumerate(spec.units):
        counted = count(spec.part(position, position + 1), spec.boundary(position), 1)
        yield name, counted.p, counted.a
