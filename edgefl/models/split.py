"""Any module as a unit list: an ``nn.Sequential`` as it is, any other ``nn.Module`` at the cuts its user names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from edgefl.models.layers import visible
from edgefl.models.spec import ModelSpec, output_spec, sequential
from edgefl.programs.contract import TensorSpec
from edgefl.wire.errors import ModelError

TAIL = "tail"


def split(
    module: nn.Module,
    cuts: Sequence[str] = (),
    *,
    sample: TensorSpec,
    classes: int,
    name: str = "custom",
    accounting_batch: int = 32,
) -> ModelSpec:
    """``module`` as a :class:`ModelSpec` that computes the same; ``sample`` is one input without batch dimension.

    An ``nn.Sequential`` without ``cuts`` keeps its children as units. Otherwise each cut is the path of a submodule
    (``"layer1"``, ``"features.3"``) after which exactly one tensor may be needed by the rest; the units are named by
    their cuts (dots become underscores), the last one ``tail``. Inside a unit, tensors keep their paths; a unit
    that is exactly one submodule drops that path, so ``layer2.0.weight`` stays ``layer2.0.weight``.

    The module is copied; batch norm and dropout become those of :mod:`edgefl.models.layers`. Raises ModelError,
    naming the cut and the tensors, where more than one tensor crosses.
    """
    copied = visible(module)
    plain = isinstance(copied, nn.Sequential) and type(copied).forward is nn.Sequential.forward
    units = sequential(copied.named_children()) if plain and not cuts else _units(copied, tuple(cuts))
    spec = ModelSpec(name, units, sample, classes, accounting_batch)
    _check_output(spec)
    return spec


def _check_output(spec: ModelSpec) -> None:
    out = output_spec(spec.module, spec.sample).shape
    allowed = {(spec.classes,)} | ({(1,)} if spec.classes == 2 else set())
    if out not in allowed:
        raise ModelError(
            f"{spec.name} gives {out} per sample; {spec.classes} classes need ({spec.classes},)", found=out
        )


def _units(module: nn.Module, cuts: tuple[str, ...]) -> nn.Sequential:
    graph = _traced(module, cuts)
    pieces = _pieces(graph, cuts)
    _check_sharing(module, pieces)
    return sequential((piece.name, piece.module(module)) for piece in pieces)


class _PathTracer(fx.Tracer):
    """Traces only the modules on the way to a cut; every other submodule stays a call, its Python untouched."""

    def __init__(self, cuts: Iterable[str]) -> None:
        super().__init__()
        self._opened = {cut[:dot] for cut in cuts for dot in _dots(cut)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


def _dots(path: str) -> list[int]:
    return [index for index, letter in enumerate(path) if letter == "."]


def _traced(module: nn.Module, cuts: tuple[str, ...]) -> fx.Graph:
    known = {name for name, _ in module.named_modules() if name}
    unknown = [cut for cut in cuts if cut not in known]
    if unknown or len(set(cuts)) != len(cuts):
        problem = f"no submodule {unknown[0]!r}" if unknown else f"a cut is named twice in {cuts}"
        raise ModelError(
            f"cannot cut: {problem}; cuts are paths of submodules", cuts=cuts, known=sorted(known)
        )
    try:
        graph = _PathTracer(cuts).trace(module)
    except Exception as error:
        raise ModelError(
            f"cannot trace {type(module).__name__} down to the cuts {list(cuts)}: {error}. Control flow on tensors is "
            "allowed inside submodules, not between them and the cuts",
            cuts=cuts,
        ) from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ModelError(
            f"a model reads one tensor; {type(module).__name__} reads {[node.name for node in inputs]}",
            inputs=[node.name for node in inputs],
        )
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            next(later for later in graph.nodes if later in node.users).prepend(node)
    return graph


@dataclass(frozen=True)
class _Piece:
    """Consecutive nodes of the graph, from the one tensor ``source`` to the one tensor ``result``."""

    name: str
    nodes: tuple[fx.Node, ...]
    source: fx.Node
    result: fx.Node

    @property
    def targets(self) -> tuple[str, ...]:
        """Paths of the submodules and tensors this piece uses."""
        return tuple(str(node.target) for node in self.nodes if node.op in ("call_module", "get_attr"))

    def module(self, root: nn.Module) -> nn.Module:
        """The piece as a module: the submodule itself where it is nothing else, or a traced graph of several."""
        if (
            len(self.nodes) == 1
            and self.nodes[0].op == "call_module"
            and self.nodes[0].args == (self.source,)
        ):
            return root.get_submodule(self.targets[0])
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {self.source: graph.placeholder("x")}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[self.result])
        return fx.GraphModule(root, graph, class_name=self.name)


def _pieces(graph: fx.Graph, cuts: tuple[str, ...]) -> list[_Piece]:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    source = next(node for node in graph.nodes if node.op == "placeholder")
    output = next(node for node in graph.nodes if node.op == "output")
    if not isinstance(output.args[0], fx.Node):
        raise ModelError("a model gives one tensor; found several outputs")
    pieces: list[_Piece] = []
    done = 0
    for cut in _in_order(cuts, nodes):
        stop = _last(cut, nodes) + 1
        result = _crossing(cut, [*graph.nodes][: [*graph.nodes].index(nodes[stop - 1]) + 1])
        pieces.append(_Piece(cut.replace(".", "_"), tuple(nodes[done:stop]), source, result))
        source, done = result, stop
    if done < len(nodes):
        pieces.append(_Piece(TAIL, tuple(nodes[done:]), source, output.args[0]))
    return pieces


def _in_order(cuts: tuple[str, ...], nodes: Sequence[fx.Node]) -> list[str]:
    return sorted(cuts, key=lambda cut: _last(cut, nodes))


def _last(cut: str, nodes: Sequence[fx.Node]) -> int:
    """Position of the last operation that belongs to the submodule ``cut``."""
    inside = [index for index, node in enumerate(nodes) if _belongs(node, cut)]
    if not inside:
        raise ModelError(f"the submodule {cut!r} is never called in forward", cut=cut)
    return inside[-1]


def _belongs(node: fx.Node, cut: str) -> bool:
    stack: dict[str, Any] = node.meta.get("nn_module_stack", {})
    paths = [entry[0] for entry in stack.values()]
    target = str(node.target) if node.op == "call_module" else ""
    return any(path == cut or path.startswith(cut + ".") for path in [*paths, target])


def _crossing(cut: str, before: Sequence[fx.Node]) -> fx.Node:
    """The one value computed so far that anything later needs."""
    early = set(before)
    crossing = [
        node for node in before if node.op != "get_attr" and any(user not in early for user in node.users)
    ]
    if len(crossing) != 1:
        names = [str(node.target) if node.op == "call_module" else node.name for node in crossing]
        raise ModelError(
            f"cut {cut!r}: exactly one tensor may cross, found {len(crossing)}: {', '.join(names)}. Cut where "
            "nothing but the cut's own output is used later (after a whole block, not inside a skip connection)",
            cut=cut,
            tensors=names,
        )
    return crossing[0]


def _check_sharing(module: nn.Module, pieces: Sequence[_Piece]) -> None:
    owner: dict[str, str] = {}
    for piece in pieces:
        for target in set(piece.targets):
            if owner.setdefault(target, piece.name) != piece.name:
                raise ModelError(
                    f"{target!r} is used in units {owner[target]!r} and {piece.name!r}; its weights cannot be in both",
                    target=target,
                    units=(owner[target], piece.name),
                )
