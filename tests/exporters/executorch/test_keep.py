"""What is computed again behind the turn: less memory, equal results, no product twice, nothing before its time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.executorch.check.programs import verify
from edgefl_export.executorch.graph import to_kernel_ops
from edgefl_export.executorch.program.emit import EmittedProgram, emit
from edgefl_export.executorch.program.partition import HELD, end_of_forward, recompute, steps_of
from edgefl_export.executorch.program.write import to_executorch
from edgefl_export.executorch.target import ExecuTorchTarget
from edgefl_export.executorch.xnnpack.region import costs, delegate, supported
from tests.exporters.examples import step_of

pytestmark = pytest.mark.slow

SHAPE, LARGE = (4, 16, 16), (4, 128, 128)


class Residual(nn.Module):
    """x + norm(conv(relu(norm(conv(x))))) three times: inner activations are cheap, outer ones lead to each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self._block() for _ in range(3))
        self.head = nn.Linear(4, 3)

    def _block(self) -> nn.Module:
        first, second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second, nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def _step(shape: tuple[int, ...] = SHAPE) -> LoweredGraph:
    return ExecuTorchTarget().capture(step_of(Residual(), shape))


def _rewritten(lowered: LoweredGraph) -> fx.GraphModule:
    module = to_kernel_ops(lowered)
    recompute(module, end_of_forward(lowered, module))
    return module


def _written(lowered: LoweredGraph, module: fx.GraphModule) -> EmittedProgram:
    return emit(module, steps_of(module), lowered.inputs, lowered.outputs)


def test_a_residual_network_keeps_much_less_for_its_backward_pass() -> None:
    lowered = _step()
    plain, less = _written(lowered, to_kernel_ops(lowered)), _written(lowered, _rewritten(lowered))

    assert less.arena_bytes < 0.5 * plain.arena_bytes


def test_a_step_that_computes_again_equals_torch() -> None:
    lowered = _step()

    assert verify(lowered.function, to_executorch(lowered).model, 1).worst < 1e-4


def test_the_program_to_compare_with_takes_more_memory_and_equals_torch() -> None:
    small, large = _step(), _step(LARGE)

    lean, plain = to_executorch(large), to_executorch(large, lean=False)

    assert plain.planned_bytes > lean.planned_bytes
    assert verify(small.function, to_executorch(small, lean=False).model, 1).worst < 1e-4


def test_no_product_is_computed_twice() -> None:
    lowered = _step()

    def products(module: fx.GraphModule) -> int:
        return sum(
            node.op == "call_function" and supported(node) and costs(node) >= 10
            for node in module.graph.nodes
        )

    assert products(_rewritten(lowered)) == products(to_kernel_ops(lowered)) > 0


def test_what_is_held_back_runs_behind_the_gradient_that_it_waits_for() -> None:
    module = _rewritten(_step())
    done: set[fx.Node] = set()
    waited = 0
    for step in steps_of(module):
        for node in step.nodes:
            waited += HELD in node.meta
            assert node.meta.get(HELD, node) in done | {node}
            done.add(node)
    assert waited > 0


def test_a_function_without_a_metric_stays_as_it_is() -> None:
    module = to_kernel_ops(_step())
    before = len(module.graph.nodes)

    recompute(module, None)

    assert len(module.graph.nodes) == before


def test_the_first_delegate_asks_for_the_workspace_of_the_largest() -> None:
    module = _rewritten(_step())
    parts = [step.nodes for step in steps_of(module) if step.delegated]
    results = set(module.graph.output_node().args[0])  # type: ignore[arg-type]
    most = max(delegate(module, nodes, results).workspace_bytes for nodes in parts)

    found = delegate(module, parts[0], results, 2 * most)

    packed = 2**15  # constants that products pack are beside it
    assert 2 * most - 4 < found.workspace_bytes <= 2 * most + packed
    assert found.reserved


def test_a_long_chain_of_cheap_ops_is_computed_again_whole() -> None:
    """Longer than Python's stack is deep, one frame or more for each op."""

    def step(t: Tensors) -> Tensors:
        leaf = t["batch.0.x"].detach().requires_grad_()
        x = leaf
        for _ in range(500):
            x = torch.sin(x)
        loss = (x * x).mean()
        return {"metric.loss": loss.detach(), "update.x": torch.autograd.grad(loss, leaf)[0]}

    lowered = ExecuTorchTarget().capture(Function("f", step, {"batch.0.x": TensorSpec((32, 1024))}))
    module = _rewritten(lowered)

    sines = [node for node in module.graph.nodes if node.target is torch.ops.aten.sin.default]
    assert len(sines) > 600
