"""Partitioner: chooses the cuts of a traced module and names the units between them.

Every point of the graph that one tensor crosses is a candidate. Cuts do not divide blocks, which are submodules whose
class the module repeats (a residual block, a transformer layer). Every unit has at least one kernel (a weight of two or
more dimensions), so that activations, pooling and norms stay with the layer before them.

All uses of a weight stay in one unit, unless tied weights, such as a language model's embedding and head, would leave
few cuts (:meth:`Partitioner.relax`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.partition.dataflow import Dataflow
from edgefl.models.partition.normalize import path_of, paths_of
from edgefl.models.partition.subgraph import Subgraph

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
# Layers that stay whole also if a subclass is the user's: they keep state that torch's code moves.
_STATEFUL = (nn.modules.batchnorm._NormBase, nn.RNNBase)


def is_layer(module: nn.Module) -> bool:
    """Return True if cuts never divide ``module``: a layer of torch or edgefl, or a subclass of a layer with statistics.

    Containers such as ``nn.Sequential`` are no layers.
    """
    package = type(module).__module__
    if isinstance(module, _STATEFUL):
        return True
    return package.startswith(("torch.nn.", "edgefl.")) and not isinstance(module, _CONTAINERS)


@dataclass(frozen=True)
class UnitCut:
    """Boundary between two units (stages of the model).

    Attributes:
        index: Index of the last step (operation that depends on the input) before the cut.
        path: Path of the submodule after which the user placed the cut, "" for an automatic cut.
    """

    index: int
    path: str = ""


class Partitioner:
    """Partitioner of a dataflow: it chooses cuts that one tensor crosses, and splits the dataflow there into units
    (stages of the model).

    Args:
        dataflow: Operations of the traced module.
        blocks: Paths of the submodules that cuts must not divide. None: those whose class occurs several times in a
            list.

    Attributes:
        dataflow: Operations of the traced module.
        blocks: Paths of the submodules that cuts must not divide.
    """

    def __init__(self, dataflow: Dataflow, blocks: Sequence[str] | None = None) -> None:
        self.dataflow = dataflow
        # First and last step of each submodule.
        self._spans: dict[str, tuple[int, int]] = {}
        for index, step in enumerate(dataflow.steps):
            for path in paths_of(step):
                self._spans[path] = (self._spans.get(path, (index, index))[0], index)
        self._valid = [index for index in range(len(dataflow.steps) - 1) if dataflow.is_valid_cut(index)]
        self.blocks = self._find_blocks() if blocks is None else blocks

    def relax(self, sample: TensorSpec) -> Partitioner:
        """Return a partitioner with weaker conditions if that more than doubles the number of units (stages of the
        model), else this one.

        First, units may read the input again: a decoder's classifier looks up at its end where the padding of each
        text begins. Second, units on both sides of a cut may read tied weights.

        Args:
            sample: Spec of one sample of the input.
        """
        partitioner, dataflow = self, self.dataflow
        if any(dataflow.graph.source in values for values in dataflow.live_values):
            partitioner = partitioner._better(Partitioner(replace(dataflow, reread_input=sample)))
            dataflow = partitioner.dataflow
        tied = self._tied_weights()
        if any(names & tied for names in dataflow.state_on_both_sides):
            partitioner = partitioner._better(Partitioner(replace(dataflow, shared_weights=tied)))
        return partitioner

    def _better(self, other: Partitioner) -> Partitioner:
        """Return ``other`` if it proposes more than twice as many units (stages of the model) as this partitioner,
        else this partitioner.
        """
        units, more = (1 + len(each.propose()) for each in (self, other))
        return other if more > 2 * units else self

    def _tied_weights(self) -> frozenset[str]:
        """Return the names of the parameters that several layers or operations use, each under the first of its names."""
        flow = self.dataflow
        users: dict[str, set[object]] = {}
        for step, names in zip(flow.steps, flow.weights_used, strict=True):
            for name in flow.first_names(names):
                users.setdefault(name, set()).add((path_of(step), step.target))
        return frozenset(name for name, uses in users.items() if len(uses) > 1) & flow.shareable_weights

    def propose(self, units: int | None = None) -> list[UnitCut]:
        """Return the automatic cuts in order; [] if the module stays one unit.

        Args:
            units: Merge neighbouring units into at most this many, with balanced numbers of weights. None: do not
                merge.
        """
        closed = [self._spans[path] for path in self.blocks if path in self._spans]
        candidates = [
            index for index in self._valid if not any(first <= index < last for first, last in closed)
        ]
        ends = [-1, *candidates, len(self.dataflow.steps) - 1]
        holds = [any(self.dataflow.kernels[a + 1 : b + 1]) for a, b in pairwise(ends)]
        # A cut lies where a kernel follows, and only once a kernel came before.
        cuts = [
            UnitCut(index)
            for each, index in enumerate(candidates)
            if holds[each + 1] and any(holds[: each + 1])
        ]
        if units is None:
            return cuts
        state = self.dataflow.graph.root.state_dict()
        sizes = [sum(state[name].numel() for name in each.state_names) for each in self.split(cuts)]
        return [cuts[start - 1] for start in balanced_starts(sizes, units)]

    def at(self, paths: Sequence[str]) -> list[UnitCut]:
        """Return the cuts behind the submodules ``paths``, in the order of execution.

        Raises:
            ModelError: Forward never calls one of them, two cuts coincide, more than one tensor crosses a cut, or both
                sides of it need state that training changes.
        """
        cuts = sorted((UnitCut(self._end_of(path), path) for path in paths), key=lambda cut: cut.index)
        for before, after in pairwise(cuts):
            if before.index == after.index:
                raise ModelError(
                    f"cuts {before.path!r} and {after.path!r} lie at the same place; name one of them",
                    cuts=tuple(paths),
                )
        for cut in cuts:
            if cut.index < len(self.dataflow.steps) - 1:
                self._check(cut)
        return cuts

    def _end_of(self, path: str) -> int:
        """Return the index of the last step of the submodule ``path``.

        Raises:
            ModelError: Forward never calls the submodule.
        """
        if path not in self._spans:
            raise ModelError(f"the submodule {path!r} is never called in forward", cut=path)
        return self._spans[path][1]

    def _check(self, cut: UnitCut) -> None:
        """Raise ModelError unless exactly one tensor crosses the cut, and both sides need no common state."""
        dataflow = self.dataflow
        live = dataflow.live_values[cut.index]
        if len(live) != 1 or not dataflow.is_sample_tensor(live[0]):
            names = [dataflow.graph.label(node) for node in live]
            raise ModelError(
                f"cut {cut.path!r}: exactly one tensor of samples may cross, found {len(live)}: {', '.join(names)}. Cut "
                "where nothing but the cut's own output is used later (after a whole block, not inside a skip connection)",
                cut=cut.path,
                tensors=names,
            )
        if statistics := dataflow.state_on_both_sides[cut.index] - dataflow.shared_weights:
            target = min(statistics)
            raise ModelError(
                f"cut {cut.path!r}: {target!r} is used before and after it, and training moves it in its forward pass: it "
                "cannot be in both units. Cut elsewhere, or give each place a layer of its own",
                cut=cut.path,
                target=target,
            )

    def split(self, cuts: Sequence[UnitCut]) -> list[Subgraph]:
        """Return the subgraphs between ``cuts``, in order: one more than there are cuts.

        A cut after the last step has no effect.
        """
        dataflow = self.dataflow
        source: fx.Node = dataflow.graph.source
        subgraphs: list[Subgraph] = []
        last = len(dataflow.steps) - 1
        for before, after in pairwise([-1, *(cut.index for cut in cuts if cut.index < last), last]):
            result = dataflow.graph.result if after == last else dataflow.live_values[after][0]
            subgraphs.append(Subgraph(dataflow, before + 1, after + 1, source, result))
            source = result
        return subgraphs

    def name(self, subgraphs: Sequence[Subgraph]) -> list[str]:
        """Return a name of the unit (stage of the model) for each subgraph, in order.

        It is the path of the submodule that the subgraph equals. Otherwise it is the path of the largest submodule that
        contains the subgraph's first kernel and no state of another subgraph.
        """
        state = frozenset[str]().union(*(each.state_names for each in subgraphs))
        return unit_names(
            each.submodule or _largest_path(self._first_weight(each), state - each.state_names)
            for each in subgraphs
        )

    def _first_weight(self, subgraph: Subgraph) -> str:
        """Return the name of the subgraph's first kernel (weight of two or more dimensions).

        Without one, return that of its first state tensor, or "" if it has no state.
        """
        steps = slice(subgraph.start, subgraph.stop)
        kernels = [name for names in self.dataflow.kernels[steps] for name in names]
        others = [name for names in self.dataflow.weights_used[steps] for name in sorted(names)]
        return next(iter([*kernels, *others]), "")

    def opened_modules(self, cuts: Sequence[UnitCut]) -> frozenset[str]:
        """Return the paths of the submodules that a second trace must trace into, because a cut lies inside.

        Includes submodules that compute the same for every input, such as positions, because each unit (stage of the
        model) repeats that computation. Excludes layers, even if they are called on both sides of a cut.
        """
        root = self.dataflow.graph.root
        same = {path for node in self.dataflow.operations for path in paths_of(node)} - self._spans.keys()
        cut_inside = {
            path
            for path, (first, last) in self._spans.items()
            if any(first <= cut.index < last for cut in cuts)
        }
        return frozenset(path for path in same | cut_inside if not is_layer(root.get_submodule(path)))

    def _find_blocks(self) -> list[str]:
        """Return the paths of the submodules that cuts must not divide: those whose class occurs several times in a list.

        Submodules that contain such lists themselves and can be cut inside, such as the stages of a ResNet, are left out.
        """
        root = self.dataflow.graph.root
        classes = _repeated_classes(root)
        instances = {path: type(module) for path, module in root.named_modules() if path in self._spans}
        stages = {
            kind
            for kind in classes
            if self._are_stages([path for path, own in instances.items() if own is kind])
        }
        return [path for path, kind in instances.items() if kind in classes - stages]

    def _are_stages(self, paths: Sequence[str]) -> bool:
        """Return True if submodules among ``paths`` contain lists of submodules of one class, and each of these can be
        cut inside.
        """
        root = self.dataflow.graph.root
        spans = [self._spans[path] for path in paths if _repeated_classes(root.get_submodule(path))]
        return bool(spans) and all(
            any(first <= index < last for index in self._valid) for first, last in spans
        )


def _repeated_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes that occur several times in one list of submodules of ``module``.

    Classes of torch are left out.
    """
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


def balanced_starts(sizes: Sequence[int], groups: int) -> list[int]:
    """Divide a sequence of sizes into consecutive groups whose largest sum is as small as possible.

    Args:
        sizes: Sizes, at least one.
        groups: Number of groups. If there are fewer sizes, each is a group of its own.

    Returns:
        Index of the first size of each group but the first.
    """
    runs = min(groups, len(sizes))
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_starts(sizes, middle, 1)) < runs else (middle + 1, high)
    return _starts(sizes, low, runs)


def _starts(sizes: Sequence[int], limit: int, runs: int) -> list[int]:
    """Return the index of the first size of each group but the first, if ``sizes`` are divided into consecutive groups.

    The sum of a group is at most ``limit``, unless it has a single size. There are at least ``runs`` groups, but
    otherwise as few as possible.
    """
    starts: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        missing = runs - 1 - len(starts)
        if index and (total + size > limit or len(sizes) - index <= missing):
            starts.append(index)
            total = 0
        total += size
    return starts


def unit_names(paths: Iterable[str]) -> list[str]:
    """Return a different name for each path, to name a unit (stage of the model): dots become ``_``.

    ``_`` is appended while the name is taken. An empty path becomes ``unit``.
    """
    names: list[str] = []
    for path in paths:
        name = path.replace(".", "_") or "unit"
        # Names of nn.Sequential's own attributes cannot be names of its children.
        while name in names or hasattr(nn.Sequential, name):
            name += "_"
        names.append(name)
    return names


def _largest_path(weight: str, others: frozenset[str]) -> str:
    """Return the path of the largest submodule that contains the tensor ``weight`` and none of the tensors ``others``.

    If there is none, return ``weight``.
    """
    parts = weight.split(".")
    for length in range(1, len(parts)):
        path = ".".join(parts[:length])
        if not any(other.startswith(f"{path}.") for other in others):
            return path
    return weight
