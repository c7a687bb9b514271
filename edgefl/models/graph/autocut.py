"""Where to cut a model that nobody annotated, and how to name what lies between the cuts.

Every point of the graph that one tensor crosses is a candidate. Of these we take the ones that leave whole what its
author repeats (a residual block, a transformer layer) and that give every unit at least one kernel (a weight of two
or more dimensions), so that activations, pooling and norms stay with the layer before them.

Uses of one tensor stay in one unit, unless tied weights, such as a language model's embedding and head, would leave little
to cut (:func:`lending`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.models.graph.flow import Flow
from edgefl.models.graph.plain import path_of, paths_of
from edgefl.models.graph.units import Stretch

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


_CLOSED = (nn.modules.batchnorm._NormBase, nn.RNNBase)


def is_layer(module: nn.Module) -> bool:
    """Return True for layers of torch and of edgefl, which are never opened, and for subclasses that keep state."""
    room = type(module).__module__
    if isinstance(module, _CLOSED):
        return True
    return room.startswith(("torch.nn.", "edgefl.")) and not isinstance(module, _CONTAINERS)


def lending(flow: Flow) -> Flow:
    """``flow``, or where that more than doubles its units, ``flow`` with cuts between the uses of tied weights."""
    tied = _tied(flow)
    if not any(names & tied for names in flow.shared):
        return flow
    parted = replace(flow, lent=tied)
    together, apart = (1 + len(chosen(each, blocks(each))) for each in (flow, parted))
    return parted if apart > 2 * together else flow


def rereading(flow: Flow, sample: TensorSpec) -> Flow:
    """``flow``, or where that more than doubles its units, ``flow`` with cuts behind which units read the sample again:
    a classifier of a decoder looks up at its end where each text's padding begins."""
    if not any(flow.traced.source in tensors for tensors in flow.crossing):
        return flow
    again = replace(flow, again=sample)
    once, twice = (1 + len(chosen(each, blocks(each))) for each in (flow, again))
    return again if twice > 2 * once else flow


def _tied(flow: Flow) -> frozenset[str]:
    """Weights that several layers or operations use, rather than one several times."""
    users: dict[str, set[object]] = {}
    for step, names in zip(flow.steps, flow.state, strict=True):
        for name in flow.tensors(names):
            users.setdefault(name, set()).add((path_of(step), step.target))
    return frozenset(name for name, uses in users.items() if len(uses) > 1) & flow.lendable


def chosen(flow: Flow, blocks: Sequence[str]) -> list[int]:
    """Steps after which to cut ``flow``, in order, none of them inside the submodules ``blocks``."""
    spans = _spans(flow)
    closed = [spans[path] for path in blocks if path in spans]
    candidates = [
        place for place in _offered(flow) if not any(first <= place < last for first, last in closed)
    ]
    holds = [
        _has_kernel(flow, before + 1, after + 1)
        for before, after in pairwise([-1, *candidates, len(flow.steps) - 1])
    ]
    # A cut lies where a kernel follows, and only once a kernel came before.
    return [place for index, place in enumerate(candidates) if holds[index + 1] and any(holds[: index + 1])]


def blocks(flow: Flow) -> list[str]:
    """Paths of the submodules whose class is repeated in a list, but for those that are lists of such blocks."""
    root, spans, offered = flow.traced.root, _spans(flow), _offered(flow)
    kinds = _repeated(root)
    instances = {path: type(module) for path, module in root.named_modules() if path in spans}
    divisible = {
        kind
        for kind in kinds
        if _is_divisible([path for path, own in instances.items() if own is kind], root, spans, offered)
    }
    return [path for path, kind in instances.items() if kind in kinds - divisible]


def opened(flow: Flow, cuts: Sequence[int]) -> frozenset[str]:
    """Paths of the submodules inside which a cut lies, and of those that compute the same for every input, such as
    positions: each unit does that for itself. Layers stay closed, even those that are called on both sides of a cut."""
    spans, root = _spans(flow), flow.traced.root
    same = {path for node in flow.nodes for path in paths_of(node)} - spans.keys()
    cut = {path for path, (first, last) in spans.items() if any(first <= place < last for place in cuts)}
    return frozenset(path for path in same | cut if not is_layer(root.get_submodule(path)))


def grouped(sizes: Sequence[int], groups: int) -> list[int]:
    """Where to cut a sequence of sizes into ``groups`` runs, or one each, whose largest sum is as small as possible.

    Returns the indices of the first item of each run but the first.
    """
    wanted = min(groups, len(sizes))
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_starts(sizes, middle, 1)) < wanted else (middle + 1, high)
    return _starts(sizes, low, wanted)


def _starts(sizes: Sequence[int], limit: int, runs: int) -> list[int]:
    """First items of the second and later runs: as few as ``limit`` allows, but at least ``runs`` runs."""
    starts: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        missing = runs - 1 - len(starts)
        if index and (total + size > limit or len(sizes) - index <= missing):
            starts.append(index)
            total = 0
        total += size
    return starts


def named(stretches: Sequence[Stretch]) -> list[str]:
    """A name for each unit: the submodule that it is, or the largest that holds its first kernel and nothing of
    another unit."""
    everything = frozenset[str]().union(*(stretch.state for stretch in stretches))
    return unit_names(
        stretch.alone or _largest(_first_kernel(stretch), everything - stretch.state) for stretch in stretches
    )


def unit_names(paths: Iterable[str]) -> list[str]:
    """A name for the unit of each path, dots as ``_``, and ``_`` behind it where that name is taken."""
    names: list[str] = []
    for path in paths:
        name = path.replace(".", "_") or "unit"
        # Names of nn.Sequential's own attributes cannot be names of its children.
        while name in names or hasattr(nn.Sequential, name):
            name += "_"
        names.append(name)
    return names


def _first_kernel(stretch: Stretch) -> str:
    """The first kernel that the stretch uses, or its first tensor if it has none; empty without any."""
    steps = slice(stretch.start, stretch.stop)
    kernels = [name for names in stretch.flow.kernels[steps] for name in names]
    others = [name for names in stretch.flow.state[steps] for name in sorted(names)]
    return next(iter([*kernels, *others]), "")


def _largest(kernel: str, others: frozenset[str]) -> str:
    parts = kernel.split(".")
    for length in range(1, len(parts)):
        path = ".".join(parts[:length])
        if not any(other.startswith(f"{path}.") for other in others):
            return path
    return kernel


def _has_kernel(flow: Flow, start: int, stop: int) -> bool:
    return any(flow.kernels[start:stop])


def _spans(flow: Flow) -> Mapping[str, tuple[int, int]]:
    """First and last step of each submodule."""
    spans: dict[str, tuple[int, int]] = {}
    for place, step in enumerate(flow.steps):
        for path in paths_of(step):
            spans[path] = (spans.get(path, (place, place))[0], place)
    return spans


def _offered(flow: Flow) -> list[int]:
    return [place for place in range(len(flow.steps) - 1) if flow.offers(place)]


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Classes, of the user's own, with several members in one list of submodules."""
    classes: set[type[nn.Module]] = set()
    for part in module.modules():
        if isinstance(part, nn.Sequential | nn.ModuleList):
            counts = Counter(type(child) for child in part if not isinstance(child, _CONTAINERS))
            classes |= {
                kind
                for kind, count in counts.items()
                if count > 1 and not kind.__module__.startswith("torch.")
            }
    return classes


def _is_divisible(
    paths: Sequence[str], root: nn.Module, spans: Mapping[str, tuple[int, int]], offered: Sequence[int]
) -> bool:
    """Whether each of these that repeats something itself can be cut inside: a stage of blocks, not a block."""
    stages = [spans[path] for path in paths if _repeated(root.get_submodule(path))]
    return bool(stages) and all(any(first <= cut < last for cut in offered) for first, last in stages)
