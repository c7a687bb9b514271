"""What code between closed submodules must not do where a model is cut: draw numbers, or depend on its mode."""

from __future__ import annotations

from itertools import zip_longest

from torch import nn

from edgefl.errors import ModelError
from edgefl.models.graph.flow import Flow
from edgefl.models.graph.plain import draws, path_of
from edgefl.models.modes import in_mode
from edgefl.models.user_code import source_of


def switches(module: nn.Module) -> bool:
    """Whether a part of ``module`` does more than to note in which mode it is."""
    held = []
    for training in (False, True):
        with in_mode(module, training=training):
            held.append([_held(part) for part in module.modules()])
    return held[0] != held[1]


def _held(part: nn.Module) -> dict[str, int]:
    """What a module holds beside its mode, by identity."""
    groups = (part.__dict__, part._modules, part._parameters, part._buffers)
    return {name: id(value) for group in groups for name, value in group.items() if name != "training"}


def check_draws(module: nn.Module, flow: Flow, where: str) -> None:
    for node in draws(flow.traced.graph):
        source = source_of(node)
        raise ModelError(
            f"{node.target} in {path_of(node) or type(module).__name__} draws random numbers {where}"
            + (f" (at {source})" if source else ""),
            operation=str(node.target),
            refused=True,
            source=source,
        )


def check_modes(module: nn.Module, inference: Flow, training: Flow) -> None:
    """ModelError if the code between the closed submodules does something else in training than in inference."""
    described = [flow.traced.described() for flow in (inference, training)]
    nodes = [flow.nodes for flow in (inference, training)]
    for (before, after), both in zip(zip_longest(*described), zip_longest(*nodes), strict=True):
        if before != after:
            source = next(filter(None, (source_of(node) for node in reversed(both) if node is not None)), "")
            raise ModelError(
                f"{type(module).__name__} computes {_short(after)} in training where it computes {_short(before)} in "
                "inference" + (f" (at {source})" if source else "") + "; put what differs into a submodule "
                "that no cut opens",
                training=after,
                inference=before,
                source=source,
            )


def _short(line: str | None) -> str:
    return (line or "nothing").partition("(")[0]
