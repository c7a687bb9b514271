"""The loss that a model computes itself, lifted out of its graph: a function of its output and the labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from edgefl.contract.tensors import TensorSpec
from edgefl.models.graph.output import Output, calling, tensor_of, without_cache
from edgefl.models.graph.plain import cleaned
from edgefl.models.graph.tracing import exported
from edgefl.models.losses.own import OwnLoss
from edgefl.models.losses.returned import ModelLoss
from edgefl.wire.errors import ModelError

Inputs = TensorSpec | Mapping[str, TensorSpec]


def lifted(
    root: nn.Module, sample: Inputs, output: Output, loss: ModelLoss, labels: TensorSpec | None
) -> OwnLoss:
    """The loss that ``root``, in inference mode, returns beside ``output`` when it is given ``labels`` (one of them).

    ModelError where it cannot be traced, and where it is made of more than the output and the labels.
    """
    label = loss.read(labels)
    inputs = {"": sample} if isinstance(sample, TensorSpec) else dict(sample)
    with _giving_loss(root, tuple(inputs), output, loss), without_cache(root):
        program = exported(root, *inputs.values(), label)
    return OwnLoss(_Slice(program, root).module(), label)


@contextmanager
def _giving_loss(root: nn.Module, inputs: tuple[str, ...], output: Output, loss: ModelLoss) -> Iterator[None]:
    """Inside, ``root`` is called with its inputs and the labels, and returns its output and its loss."""
    original, name = root.forward, type(root).__name__

    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        first, *others = given[:-1]
        named = {**dict(zip(inputs[1:], others, strict=True)), loss.labels: given[-1]}
        returned = original(first, **named)
        if isinstance(returned, Tensor):
            raise ModelError(
                f"{name} returns its output alone: leave the loss `model` out, and name one that fits"
            )
        return tensor_of(returned, output, name), tensor_of(returned, loss.key, name)

    # torch.export takes one input for each parameter.
    numbered = [Parameter(f"given_{place}", Parameter.POSITIONAL_ONLY) for place in range(len(inputs) + 1)]
    forward.__signature__ = Signature(numbered)  # type: ignore[attr-defined]
    with calling(root, forward):
        yield


class _Slice:
    """The part of a graph between a model's output and its loss."""

    def __init__(self, program: ExportedProgram, root: nn.Module) -> None:
        self._name = type(root).__name__
        graph = cleaned(program.graph_module)
        signature = program.graph_signature
        nodes = {node.name: node for node in graph.nodes}
        self._output, self._loss = (nodes[str(each)] for each in signature.user_outputs)
        kinds = {each.arg.name: each for each in signature.input_specs}
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        given = [node for node in inputs if kinds[node.name].kind is InputKind.USER_INPUT]
        self._labels = given[-1]
        # Buffers, such as weights of the classes, are what they were when the model was cut.
        self._constants = {
            node: root.get_buffer(str(each.target))
            if each.kind is InputKind.BUFFER
            else program.constants[str(each.target)]
            for node, each in ((node, kinds[node.name]) for node in inputs)
            if each.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        }
        self._batch = given[0].meta["val"].shape[0].node.expr
        self._nodes: list[fx.Node] = list(graph.nodes)

    def module(self) -> fx.GraphModule:
        needed = self._needed()
        made, held = fx.Graph(), nn.Module()
        copies: dict[fx.Node, Any] = {
            self._output: made.placeholder("out"),
            self._labels: made.placeholder("y"),
        }
        for node in self._nodes:
            if node not in needed or node in copies:
                continue
            if self._is_batch(node):
                copies[node] = made.call_method("size", (copies[self._output], 0))
            elif node in self._constants:
                held.register_buffer(node.name, self._constants[node], persistent=False)
                copies[node] = made.get_attr(node.name)
            else:
                copies[node] = made.node_copy(node, copies.__getitem__)
        made.output(copies[self._loss])
        module = fx.GraphModule(held, made, class_name=f"LossOf{self._name}")
        module.__dict__["__name__"] = f"loss of {self._name}"
        return module

    def _needed(self) -> set[fx.Node]:
        """All that the loss is computed from, up to the output and the labels."""
        nodes: set[fx.Node] = set()
        waiting = [self._loss]
        while waiting:
            node = waiting.pop()
            if node in nodes:
                continue
            nodes.add(node)
            if node.op == "placeholder" and node is not self._labels and node not in self._constants:
                raise ModelError(
                    f"the loss of {self._name} is made of more than its output and the labels ({node.name}): name "
                    "another loss, or write one as a function (out, y)",
                    tensor=node.name,
                )
            if node is not self._output and not self._is_batch(node):
                waiting += node.all_input_nodes
        return nodes

    def _is_batch(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and value.node.expr == self._batch
