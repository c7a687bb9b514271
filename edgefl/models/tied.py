"""Tied weights: tensors that several units use. Each is once in the state, as a parameter of the last unit that uses it.

Tied layers, such as a language model's embedding and head, share one ``nn.Parameter``. All units refer to that object.
In every other place it is a non-persistent buffer, so that ``state_dict`` and ``named_parameters`` have one name for
it. ``torch.func.functional_call`` replaces tied tensors together, and so gives the value under that name to all uses::

    units = share_weights(units)
    borrowed_names(units[:1])     # {"embed.weight": "head.weight"}: the first unit reads a tensor of another unit's state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, fx, nn

from edgefl.errors import ModelError
from edgefl.models.copies import copy_module
from edgefl.models.spec import sequential

# Attribute of a module that reads such buffers: the global name of each.
_NAMES = "edgefl_tied"


class BorrowedWeight(nn.Module):
    """Layer of a unit's graph that returns a tensor of another unit's state.

    Args:
        value: The tensor itself, which both units (stages of the model) share.
        name: Global name of the tensor.
    """

    value: Tensor

    def __init__(self, value: nn.Parameter, name: str) -> None:
        super().__init__()
        _register_read(self, "value", value, name)

    def forward(self) -> Tensor:
        return self.value


@dataclass(frozen=True, eq=False)
class _ParameterUse:
    """Place at which a parameter is registered: attribute ``own`` of the module ``holder``.

    ``path`` is the path of ``holder`` in the unit with the name ``unit``.
    """

    unit: str
    path: str
    holder: nn.Module
    own: str

    @property
    def local(self) -> str:
        return f"{self.path}.{self.own}" if self.path else self.own

    @property
    def name(self) -> str:
        return f"{self.unit}.{self.local}"


def share_weights(units: nn.Sequential) -> nn.Sequential:
    """Return the units (stages of the model) with each shared tensor as a parameter of the last unit that uses it, and
    a buffer in all others.

    So the tensor has one name in the state. A module that is in several units is copied. The tensors stay the same
    objects.

    Raises:
        ModelError: Several units share a buffer of the state, such as moving statistics, which each of them would
            change.
    """
    made = _separate_modules(units)
    by_tensor: dict[int, list[_ParameterUse]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for use, parameter in _uses(made):
        by_tensor.setdefault(id(parameter), []).append(use)
        tensors[id(parameter)] = parameter
    for key, uses in by_tensor.items():
        home = _home(made, uses)
        for use in uses:
            if use is not home:
                _lend(made.get_submodule(use.unit), use, tensors[key], home.name)
    return made


def borrowed_names(module: nn.Module) -> dict[str, str]:
    """Return the tensors that ``module`` reads from the state of other units: their global names, by path in ``module``."""
    own = {id(parameter) for parameter in module.parameters()}
    return {
        f"{path}.{name}" if path else name: full
        for path, part in module.named_modules()
        for name, full in _names(part).items()
        if id(part._buffers[name]) not in own
    }


def collect_state(module: nn.Module) -> dict[str, Tensor]:
    """Return all state tensors that ``module`` reads, by global name: its own, and those that another unit (stage) keeps.

    They are detached, not copied.
    """
    lent = {name: module.get_buffer(path) for path, name in borrowed_names(module).items()}
    return {name: tensor.detach() for name, tensor in (module.state_dict() | lent).items()}


def units_with_tied_weights(units: nn.Sequential) -> frozenset[str]:
    """Return the names of the units (stages of the model) that own or borrow a tensor which several units use."""
    lent = [
        (unit, name)
        for unit, module in units.named_children()
        for part in module.modules()
        for name in _names(part).values()
    ]
    return frozenset(name for unit, full in lent for name in (unit, full.partition(".")[0]))


def _names(module: nn.Module) -> dict[str, str]:
    """Return the global names of the tensors of other units (stages) that ``module`` reads, by attribute.

    Children are excluded.
    """
    return cast(dict[str, str], module.__dict__.get(_NAMES, {}))


def _register_read(holder: nn.Module, own: str, value: nn.Parameter, name: str) -> None:
    """Register ``value`` as a non-persistent buffer ``own`` of ``holder``, and store its global name ``name`` in
    ``holder``.
    """
    holder._buffers[own] = value
    holder._non_persistent_buffers_set.add(own)
    holder.__dict__[_NAMES] = {**_names(holder), own: name}


def _separate_modules(units: nn.Sequential) -> nn.Sequential:
    """Return the units (stages of the model), with a copy of each module that occurs in several units or several times
    in one.

    The last occurrence keeps the module itself. The copies have the same tensors.
    """
    made: list[tuple[str, nn.Module]] = []
    later: set[nn.Module] = set()
    statistics: dict[int, str] = {}
    for name, own in reversed([(name, unit) for name, unit in units._modules.items() if unit is not None]):
        holders = {part for part in own.modules() if part._parameters}
        tensors: dict[int, object] = {id(tensor): tensor for tensor in (*own.parameters(), *own.buffers())}
        unit = own if later.isdisjoint(holders) else copy_module(own, tensors)
        later |= holders
        _separate_within(unit)
        made.append((name, unit))
        _check_buffers(name, unit, statistics)
    return sequential(reversed(made))


def _separate_within(unit: nn.Module) -> None:
    """Replace a module that occurs several times in ``unit`` by one copy per place, with the same weights.

    A module with buffers is not copied, because all its uses change the same statistics.
    """
    met: set[nn.Module] = set()
    done = " "
    for path, part in list(unit.named_modules(remove_duplicate=False)):
        if path.startswith(f"{done}."):
            continue
        if part in met and list(part.parameters()) and not list(part.buffers()):
            tensors: dict[int, object] = {id(tensor): tensor for tensor in part.parameters()}
            unit.set_submodule(path, copy_module(part, tensors))
            done = path
        met.add(part)


def _check_buffers(name: str, unit: nn.Module, seen: dict[int, str]) -> None:
    """Raise ModelError if a buffer of the unit (stage of the model) is also a buffer of another unit.

    Args:
        name: Name of the unit.
        unit: The unit.
        seen: Global name of each buffer so far, by the ``id`` of the tensor. The unit's are added.
    """
    parameters = dict(unit.named_parameters(remove_duplicate=False))
    for path, tensor in unit.state_dict(keep_vars=True).items():
        other = f"{name}.{path}" if path in parameters else seen.setdefault(id(tensor), f"{name}.{path}")
        if other != f"{name}.{path}":
            raise ModelError(
                f"the buffers '{name}.{path}' and {other!r} are one tensor, in two units that would each move it; give each "
                "a layer of its own, or cut so that both are in one unit",
                names=(f"{name}.{path}", other),
            )


def _uses(units: nn.Sequential) -> Iterator[tuple[_ParameterUse, nn.Parameter]]:
    """Yield (place, parameter) for each registration of each parameter, in the order of the units (stages of the model)."""
    for name, unit in units.named_children():
        for path, part in unit.named_modules():
            for own, parameter in part._parameters.items():
                if parameter is not None:
                    yield _ParameterUse(name, path, part, own), parameter


def _home(units: nn.Sequential, uses: list[_ParameterUse]) -> _ParameterUse:
    """Return the place of ``uses`` that keeps a shared parameter. All other places will read the parameter from there.

    It is in the last unit (stage of the model), and if possible one that the unit's graph reads by name. ``uses`` has all
    places of the parameter in the order of the units.
    """
    last = [use for use in uses if use.unit == uses[-1].unit]
    read = _read_by_name(units.get_submodule(uses[-1].unit))
    return next((use for use in last if use.local in read), last[-1])


def _read_by_name(unit: nn.Module) -> Mapping[str, list[fx.Node]]:
    """Return the nodes of the unit's own graph that read a tensor, by the tensor's name; {} if the unit (stage of the
    model) is no graph module.
    """
    nodes: dict[str, list[fx.Node]] = {}
    for node in unit.graph.nodes if isinstance(unit, fx.GraphModule) else ():
        if node.op == "get_attr":
            nodes.setdefault(str(node.target), []).append(node)
    return nodes


def _lend(unit: nn.Module, use: _ParameterUse, value: nn.Parameter, name: str) -> None:
    """Replace a use of a parameter by a read of the state tensor that another place keeps, in place.

    Args:
        unit: Unit of the use.
        use: Place that loses its parameter.
        value: The parameter.
        name: Global name under which the state has it.
    """
    nodes = _read_by_name(unit).get(use.local, [])
    if nodes:
        graph = cast(fx.GraphModule, unit)
        path = f"borrowed_{use.local.replace('.', '_')}"
        graph.add_submodule(path, BorrowedWeight(value, name))
        for node in nodes:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_module(path))
            graph.graph.erase_node(node)
        graph.recompile()
    del use.holder._parameters[use.own]
    if not nodes or any(_calls(node, use.path) for node in cast(fx.GraphModule, unit).graph.nodes):
        _register_read(use.holder, use.own, value, name)


def _calls(node: fx.Node, path: str) -> bool:
    """Return True if ``node`` calls the submodule ``path`` or one that contains it."""
    return node.op == "call_module" and bool(path) and f"{path}.".startswith(f"{node.target}.")
