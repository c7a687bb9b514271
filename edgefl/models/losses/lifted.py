"""Extraction of the loss that a model computes itself, as a function of its output and the labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature
from itertools import zip_longest
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_map

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.own import ModelLoss, OwnLoss
from edgefl.models.modes import keeping_modes
from edgefl.models.partition.normalize import normalize
from edgefl.models.partition.output import Output, replaced_forward, select_output, without_cache
from edgefl.models.partition.tracer import export_module

_ROWS = 2
_MOST_SHOWN = 120
Inputs = TensorSpec | Mapping[str, TensorSpec]


def lift_loss(
    root: nn.Module, sample: Inputs, output: Output, loss: ModelLoss, labels: TensorSpec | None
) -> OwnLoss:
    """Return the loss that a module computes itself, as a function of its output and the labels.

    The module is traced with labels in training and in inference mode, because some models smooth labels or add terms
    only in training.

    Args:
        root: Module. It is not changed.
        sample: One sample of the input, or of several inputs by name.
        output: Selects the output among the returned values.
        loss: Names of the labels' argument and of the loss in the returned value.
        labels: One label of the data.

    Raises:
        ModelError: The module cannot be traced, or its loss needs more than the output and the labels. Also if the
            loss differs between training and inference, or counts labels that the data ignore.
    """
    label = loss.label_of_data(labels)
    inputs = {"": sample} if isinstance(sample, TensorSpec) else dict(sample)
    parts = []
    for training in (True, False):
        with keeping_modes(root), _returning_loss(root, tuple(inputs), output, loss), without_cache(root):
            root.train(training)
            algorithm = export_module(root, *inputs.values(), label)
        parts.append(_LossGraph(algorithm, root))
    _check_same(parts[0].describe(), parts[1].describe(), type(root).__name__)
    function = parts[0].module()
    _check_ignored(function, parts[0].output, label, type(root).__name__)
    return OwnLoss(function, label)


def _check_same(training: list[str], inference: list[str], name: str) -> None:
    """Raise ModelError if the operations of the loss differ between training and inference.

    Both are lists of :meth:`_LossGraph.describe`; ``name`` is the class of the module.
    """
    different = next((pair for pair in zip_longest(training, inference) if pair[0] != pair[1]), None)
    if different is not None:
        found = [shorten(line or "nothing", _MOST_SHOWN) for line in different]
        raise ModelError(
            f"{name} computes its loss by {found[0]} in training and by {found[1]} in inference: expected the same loss in "
            "both, because devices train and evaluate with one; write the loss of training as a function (out, y) and give "
            "it as `loss`",
            training=different[0],
            inference=different[1],
        )


def _check_ignored(function: fx.GraphModule, out: TensorSpec, label: TensorSpec, name: str) -> None:
    """Raise ModelError if labels that the data ignore contribute to the loss. Runs it on a batch of only ignored labels.

    Args:
        function: Graph module (outputs, labels) of the loss.
        out: One output sample.
        label: One label, with the ignored number.
        name: Class of the module, for the error text.
    """
    if label.ignored is None:
        return
    outputs = torch.randn((_ROWS, *out.shape), generator=torch.Generator().manual_seed(0))
    ignored = torch.full((_ROWS, *label.shape), label.ignored, dtype=label.dtype)
    try:
        value = float(function(outputs, ignored))
    except (RuntimeError, IndexError):
        value = math.inf
    # A mean over no label is 0 / 0.
    if not math.isnan(value) and value != 0.0:
        raise ModelError(
            f"the loss of {name} counts labels of {label.ignored}, and the data say to ignore them: label these -100, or "
            "whatever the model ignores, or take cross_entropy, sequence_cross_entropy or causal_lm with ignore_index",
            ignored=label.ignored,
        )


@contextmanager
def _returning_loss(
    root: nn.Module, inputs: tuple[str, ...], output: Output, loss: ModelLoss
) -> Iterator[None]:
    """Replace the forward of ``root`` for the ``with`` block.

    It takes all inputs and then the labels, and returns (output, loss).

    Args:
        root: Module.
        inputs: Names of the inputs. The first is passed by position.
        output: Selects the output among the returned values.
        loss: Names of the labels' argument and of the loss in the returned value.
    """
    original, name = root.forward, type(root).__name__

    def forward(*inputs_and_labels: Any) -> tuple[Tensor, Tensor]:
        first, *others = inputs_and_labels[:-1]
        named = {**dict(zip(inputs[1:], others, strict=True)), loss.labels: inputs_and_labels[-1]}
        returned = original(first, **named)
        if isinstance(returned, Tensor):
            raise ModelError(
                f"{name} returns its output alone: leave the loss `model` out, and name one that fits"
            )
        return select_output(returned, output, name), select_output(returned, loss.key, name)

    # torch.export takes one input for each parameter.
    numbered = [Parameter(f"given_{place}", Parameter.POSITIONAL_ONLY) for place in range(len(inputs) + 1)]
    forward.__signature__ = Signature(numbered)  # type: ignore[attr-defined]
    with replaced_forward(root, forward):
        yield


class _LossGraph:
    """Part of an exported module's graph that computes the loss from the module's output and the labels."""

    def __init__(self, algorithm: ExportedProgram, root: nn.Module) -> None:
        self._name = type(root).__name__
        graph = normalize(algorithm.graph_module)
        signature = algorithm.graph_signature
        nodes = {node.name: node for node in graph.nodes}
        self._output, self._loss = (nodes[str(each)] for each in signature.user_outputs)
        kinds = {each.arg.name: each for each in signature.input_specs}
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        given = [node for node in inputs if kinds[node.name].kind is InputKind.USER_INPUT]
        self._labels = given[-1]
        # Buffers, such as weights of the classes, keep their values at the time of the cut.
        self._constants = {
            node: root.get_buffer(str(each.target))
            if each.kind is InputKind.BUFFER
            else algorithm.constants[str(each.target)]
            for node, each in ((node, kinds[node.name]) for node in inputs)
            if each.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        }
        self._batch = given[0].meta["val"].shape[0].node.expr
        self._nodes: list[fx.Node] = list(graph.nodes)

    @property
    def output(self) -> TensorSpec:
        """Spec of one output sample of the model."""
        value = self._output.meta["val"]
        return TensorSpec(tuple(value.shape[1:]), value.dtype)

    def describe(self) -> list[str]:
        """Return one line per operation and constant. Two graphs with equal lists compute the same."""
        needed = self._needed_nodes()
        names: dict[fx.Node, str] = {self._output: "out", self._labels: "y"}
        lines = []
        for node in self._nodes:
            if node not in needed or node in names:
                continue
            names[node] = "batch" if self._is_batch(node) else f"%{len(names)}"
            if node in self._constants:
                lines.append(f"constant({self._constants[node].tolist()})")
            elif not self._is_batch(node):
                inputs = tree_map(lambda leaf: names.get(leaf, str(leaf)), (node.args, dict(node.kwargs)))
                lines.append(f"{node.target}({inputs})")
        return [*lines, f"returned({names.get(self._loss, '')})"]

    def module(self) -> fx.GraphModule:
        """Return a new graph module whose call (outputs, labels) computes the loss."""
        needed = self._needed_nodes()
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

    def _needed_nodes(self) -> set[fx.Node]:
        """Return the nodes that the loss depends on. The search ends at the output, the labels and the batch size.

        Raises:
            ModelError: The loss depends on another input.
        """
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
        """Return True if the value of ``node`` is the batch size."""
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and value.node.expr == self._batch
