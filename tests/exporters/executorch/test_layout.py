"""Transpositions go where they cost least, without a change of results."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl_export.executorch.layout import move_transpositions
from edgefl_export.executorch.rules import table

_aten = torch.ops.aten


def _traced(function: object, *example: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake", decomposition_table=table())(*example)  # type: ignore[arg-type]
    output = module.graph.output_node()
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    return module


def _moved(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, mapping := {}))
    graph.output_node().args = (tuple(mapping[node] for node in module.graph.output_node().args[0]),)
    copy = fx.GraphModule(module, graph)
    move_transpositions(copy)
    copy.recompile()
    return copy


def _of_images(module: fx.GraphModule) -> list[list[int]]:
    """Orders of the transpositions of four axes."""
    return [
        list(node.args[1])  # type: ignore[arg-type]
        for node in module.graph.nodes
        if node.target is _aten.permute.default and len(node.args[1]) == 4  # type: ignore[arg-type]
    ]


def _block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = torch.conv2d(x, w, padding=1).relu()
    z = torch.conv2d(y, v, padding=1)
    return torch.cat([z + y, y * 2], 1).mean((2, 3))


def _arrays(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_images_are_turned_once_and_stay_channels_last_to_the_end() -> None:
    example = _arrays((2, 8, 6, 6), (8, 8, 3, 3), (8, 8, 3, 3))
    before = _traced(_block, *example)

    after = _moved(before)

    assert _of_images(before).count([0, 3, 1, 2]) >= 2
    assert [0, 3, 1, 2] not in _of_images(after)
    assert _of_images(after).count([0, 2, 3, 1]) == 1
    torch.testing.assert_close(after(*example)[0], _block(*example), rtol=1e-5, atol=1e-5)


def test_moving_transpositions_changes_no_result_of_a_training_step() -> None:
    def step(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        def loss(kernel: Tensor) -> Tensor:
            y = torch.max_pool2d(torch.conv2d(x, kernel, stride=2, padding=1).relu() * scale, 2)
            return (torch.nn.functional.pad(y, (1, 2, 0, 1))[:, 1:, :, 1:] ** 2).mean((1, 2, 3)).sum()

        leaf = w.detach().requires_grad_()
        return (torch.autograd.grad(loss(leaf), leaf)[0],)

    example = _arrays((2, 4, 12, 12), (6, 4, 3, 3), (6, 1, 1))
    joint = make_fx(step)(*example)
    before = _traced(torch.func.functionalize(joint), *example)

    after = _moved(before)

    assert len(_of_images(after)) < len(_of_images(before))
    torch.testing.assert_close(after(*example)[0], step(*example)[0], rtol=1e-4, atol=1e-4)


def test_what_has_other_orders_stays_as_it_is() -> None:
    def product(x: Tensor) -> Tensor:
        return (x.permute(0, 2, 1, 3) * 2).reshape(2, -1)

    (x,) = _arrays((2, 3, 4, 5))
    after = _moved(_traced(product, x))

    assert _of_images(after) == [[0, 2, 1, 3]]
    torch.testing.assert_close(after(x)[0], product(x))
