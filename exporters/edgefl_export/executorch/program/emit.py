"""Program of steps: values with their memory, instructions, constants, delegates."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import executorch.exir.schema as schema  # noqa: PLR0402 - `from executorch.exir` would load all of that package
import torch
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir.scalar_type import ScalarType
from torch import Tensor, fx

from edgefl_export.capture.nodes import results
from edgefl_export.executorch.arena import ALIGNMENT, Lifetime, plan_arena
from edgefl_export.executorch.graph import base_of
from edgefl_export.executorch.program.kernels import (
    LEAVING,
    TYPES,
    ProgramStep,
    arguments_of,
    kernel_of,
    results_of,
)
from edgefl_export.executorch.xnnpack.memory import FLOAT
from edgefl_export.executorch.xnnpack.region import WrittenDelegate, delegate

Slot = tuple[fx.Node, int]
"""Node, and the index of one of its results."""

LEFT = -1
"""Index, in a slot, for bytes of a result that leave the program as another type."""

BACKEND = "XnnpackBackend"

MARGIN = 1.125
"""Factor on the reserved workspace. XNNPACK needs up to a tenth more than our model of it predicts for many values of equal
size, and a workspace that has to grow exists twice for a moment."""


@dataclass(frozen=True)
class EmittedProgram:
    """ExecuTorch program as bytes, with its cost.

    Attributes:
        model: bytes of the program.
        arena_bytes: size of its arena.
        workspace_bytes: size of the workspace that its delegates share.
        delegated_values: number of values in all delegates.
        instructions: index of the instruction that first runs a node, by name of the node.
    """

    model: bytes
    arena_bytes: int
    workspace_bytes: int
    delegated_values: int
    instructions: Mapping[str, int]


def emit(
    module: fx.GraphModule,
    steps: Sequence[ProgramStep],
    inputs: Iterable[str],
    outputs: Iterable[str],
    *,
    reserve: bool = True,
    planned_outputs: bool = False,
    named: bool = False,
) -> EmittedProgram:
    """Write steps as an ExecuTorch program.

    Args:
        module: graph with the nodes of ``steps``.
        steps: steps in the order of execution.
        inputs: names of the input ports in order. They are stored; the runtime identifies ports by order.
        outputs: names of the output ports in order.
        reserve: the first delegate reserves the largest workspace of all, so that the workspace never grows.
        planned_outputs: outputs lie in the arena until the end of the call. If false, the caller provides their memory.
        named: store the name with each tensor as well, as needed if ports are rows of a port.
    """
    names = schema.ContainerMetadata("\n".join(inputs), "\n".join(outputs))
    return _ProgramWriter(module, steps, names, reserve, planned_outputs, named).write()


def slot_of(node: fx.Node) -> Slot:
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


@dataclass
class _ProgramWriter:
    module: fx.GraphModule
    steps: Sequence[ProgramStep]
    names: schema.ContainerMetadata
    reserve: bool
    planned_outputs: bool = False
    named: bool = False
    values: list[schema.EValue] = field(default_factory=list)
    _numbers: dict[object, int] = field(default_factory=dict)
    _tensors: dict[fx.Node | Slot, int] = field(default_factory=dict)
    _constants: list[bytes] = field(default_factory=lambda: [b""])
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _operators: dict[tuple[str, str], int] = field(default_factory=dict)
    _left: set[Slot] = field(default_factory=set)
    _delegated: int = 0
    _blobs: list[bytes] = field(default_factory=list)
    _spans: dict[Slot, Lifetime] = field(default_factory=dict)
    _aliases: dict[fx.Node, Slot] = field(default_factory=dict)
    _instructions: list[schema.Instruction] = field(default_factory=list)

    def write(self) -> EmittedProgram:
        graph = self.module.graph
        inputs = [self._tensor(node) for node in graph.nodes if node.op == "placeholder"]
        self._left.update(slot_of(node) for node in results(graph))
        outputs = [self._tensor(node) for node in results(graph)]
        if self.named:
            self._name([*inputs, *outputs])
        regions = self._regions()
        instructions: dict[str, int] = {}
        for turn, step in enumerate(self.steps):
            instructions |= dict.fromkeys((node.name for node in step.nodes), len(self._instructions))
            if step.delegated:
                self._delegate(regions[turn], turn)
            else:
                self._kernel(step.nodes[0], turn)
        workspace = max((region.workspace_bytes for region in regions.values()), default=0)
        arena = self._place()
        plan = schema.ExecutionPlan(
            name="forward",
            container_meta_type=self.names,
            values=self.values,
            inputs=inputs,
            outputs=outputs,
            chains=[schema.Chain([], [], self._instructions, None)],
            operators=[schema.Operator(name, variant) for name, variant in self._operators],
            delegates=[
                schema.BackendDelegate(
                    BACKEND, schema.BackendDelegateDataReference(schema.DataLocation.INLINE, index), []
                )
                for index in range(len(self._blobs))
            ],
            non_const_buffer_sizes=[0, arena] if arena else [0],
        )
        program = schema.Program(
            version=0,
            execution_plan=[plan],
            constant_buffer=[schema.Buffer(data) for data in self._constants],
            backend_delegate_data=[schema.BackendDelegateInlineData(blob) for blob in self._blobs],
            segments=[],
            constant_segment=schema.SubsegmentOffsets(0, []),
        )
        # Delegates stay within the program: segments of their own are freed once they are set up, by every loader but the
        # one that reads from memory, and XNNPACK keeps reading constants in place.
        model = bytes(serialize_pte_binary(PTEFile(program), extract_delegate_segments=False))
        return EmittedProgram(model, arena, workspace, self._delegated, instructions)

    # values

    def _name(self, indices: Sequence[int]) -> None:
        names = [*self.names.encoded_inp_str.split("\n"), *self.names.encoded_out_str.split("\n")]
        for index, name in zip(indices, names, strict=True):
            self.values[index].val.extra_tensor_info = schema.ExtraTensorInfo(fully_qualified_name=name)

    def _add(self, value: Any) -> int:
        self.values.append(schema.EValue(value))
        return len(self.values) - 1

    def _number(self, value: object) -> int:
        """Return the index, in the program's list of values, of a value that is no tensor, such as a number. Adds it if
        it is new.
        """
        key = (type(value), repr(value))
        if key not in self._numbers:
            self._numbers[key] = self._add(_plain(value))
        return self._numbers[key]

    def _list(self, kind: str, value: Sequence[Any]) -> int:
        key = (kind, tuple(value))
        if key not in self._numbers:
            if kind == "int":
                made: Any = schema.IntList([self._number(int(item)) for item in value])
            elif kind == "bool":
                made = schema.BoolList([bool(item) for item in value])
            else:
                made = schema.DoubleList([float(item) for item in value])
            self._numbers[key] = self._add(made)
        return self._numbers[key]

    def _tensor(self, node: fx.Node) -> int:
        """Return the index of the tensor of ``node`` in the program's list of values. Adds its description if it is new."""
        if node.op == "get_attr":
            return self._constant(getattr(self.module, str(node.target)))
        slot = slot_of(node)
        base = base_of(node)
        key: fx.Node | Slot = node if base is not node else slot
        if key not in self._tensors:
            self._tensors[key] = self._add(_describe(node.meta["val"]))
            if base is not node and (base.op == "get_attr" or self._is_outside(slot_of(base))):
                # Its memory is known only when the program runs, and set then.
                first = self._tensor(base)
                shape = self._list("int", node.meta["val"].shape)
                arguments = [first, shape, self._tensors[key]]
                self._call("executorch_prim::et_view", "default", arguments)
            elif base is not node:
                self._aliases[node] = slot_of(base)
        return self._tensors[key]

    def _is_outside(self, slot: Slot) -> bool:
        """Return True if the caller provides the memory of ``slot``: an input, or an output that is not planned."""
        return slot[0].op == "placeholder" or (slot in self._left and not self.planned_outputs)

    def _constant(self, value: Tensor) -> int:
        data = value.detach().contiguous().numpy().tobytes()
        key = (value.dtype, tuple(value.shape), data)
        if key not in self._known:
            described = _describe(value)
            described.data_buffer_idx = len(self._constants)
            self._constants.append(data or b"\0")
            self._known[key] = self._add(described)
        return self._known[key]

    # time

    def _made(self, slot: Slot, turn: int, size: int) -> None:
        if not self._is_outside(slot):
            # An output is read by the caller, after the last step.
            self._spans[slot] = Lifetime(size, turn, len(self.steps) if slot in self._left else turn)

    def _read(self, node: fx.Node, turn: int) -> int:
        slot = slot_of(base_of(node))
        if slot in self._spans:
            span = self._spans[slot]
            self._spans[slot] = Lifetime(span.size, span.first, max(span.last, turn))
        return self._tensor(node)

    def _place(self) -> int:
        offsets, total = plan_arena(self._spans)
        if offsets and not total:
            total = ALIGNMENT  # a value of no entries has a place too
        for key, index in self._tensors.items():
            slot = self._aliases.get(key) if isinstance(key, fx.Node) else (key[0], max(key[1], LEFT))
            if slot in offsets:
                offset = offsets[slot]
                self.values[index].val.allocation_info = schema.AllocationDetails(
                    memory_id=1, memory_offset_low=offset & 0xFFFFFFFF, memory_offset_high=offset >> 32
                )
        return total

    # instructions

    def _call(self, name: str, variant: str, arguments: list[int]) -> None:
        at = self._operators.setdefault((name, variant), len(self._operators))
        self._instructions.append(schema.Instruction(schema.KernelCall(at, arguments)))

    def _kernel(self, node: fx.Node, turn: int) -> None:
        kernel = kernel_of(node.target)
        assert kernel is not None, node
        arguments = [self._argument(value, kind, node, turn) for value, kind in arguments_of(node, kernel)]
        written = [self._write_result(node, index, turn) for index in range(len(results_of(node)))]
        outs = [out for out, _ in written]
        if kernel.takes_list:
            outs = [self._add(schema.TensorList(outs))]
        arguments += outs
        arguments.append(outs[0] if len(outs) == 1 else self._add(schema.TensorList(list(outs))))
        self._call(kernel.name, kernel.variant, arguments)
        for copied in (copied for _, copied in written if copied):
            self._call("aten::view_copy", "out", copied)

    def _write_result(self, node: fx.Node, index: int, turn: int) -> tuple[int, list[int]]:
        """Register the memory of a result, and return (index of the value that a kernel writes, arguments of a copy to
        the output).

        The arguments are empty unless no kernel writes the type of the output. Then the bytes in the arena have two
        descriptions: one with a type that kernels write, one with the type of the output.

        Args:
            node: node that the kernel runs.
            index: number of the result of ``node``.
            turn: number of the step that runs it.
        """
        value = results_of(node)[index]
        self._made((node, index), turn, value.numel() * value.itemsize)
        key = (node, index)
        if key not in self._tensors:
            self._tensors[key] = self._add(_describe(value))
        if value.dtype not in LEAVING:
            return self._tensors[key], []
        names = []
        for place, dtype in ((LEFT, LEAVING[value.dtype][1]), (LEFT - 1, value.dtype)):
            names.append(self._add(_describe(value, dtype)))
            self._tensors[node, place] = names[-1]
        self._spans[node, LEFT] = Lifetime(value.numel() * value.itemsize, turn, turn)
        return names[0], [names[1], self._list("int", value.shape), self._tensors[key], self._tensors[key]]

    def _argument(self, value: Any, kind: Any, node: fx.Node, turn: int) -> int:
        """Return the index, in the program's list of values, of the argument ``value`` of the kernel of ``node``.

        ``kind`` is its type in the schema, ``turn`` the number of the step that reads it.
        """
        text = str(kind)
        if isinstance(value, fx.Node):
            return self._read(value, turn)
        if value is not None and text in {"Tensor", "Optional[Tensor]"}:
            return self._constant(_as_tensor(value, node))
        if value is not None and "List[" in text:
            if "Tensor" not in text:
                items = value if isinstance(value, (list, tuple)) else [value]
                return self._list("int" if "int" in text else "bool" if "bool" in text else "float", items)
            indices = [-1 if item is None else self._read(item, turn) for item in value]
            kinds = schema.OptionalTensorList if "Optional[Tensor]" in text else schema.TensorList
            return self._add(kinds(indices))
        return self._number(_to_plain(value, text))

    def _regions(self) -> dict[int, WrittenDelegate]:
        """Return the XNNPACK delegate of each delegated step, by the step's number; with ``reserve``, the first
        reserves the workspace.
        """
        left = set(results(self.module.graph))
        turns = [turn for turn, step in enumerate(self.steps) if step.delegated]
        made = {turn: delegate(self.module, self.steps[turn].nodes, left) for turn in turns}
        most = max((region.workspace_bytes for region in made.values()), default=0)
        if self.reserve and len(made) > 1:
            room = int(most * MARGIN)
            made[turns[0]] = delegate(self.module, self.steps[turns[0]].nodes, left, room)
        return made

    def _delegate(self, region: WrittenDelegate, turn: int) -> None:
        arguments = [self._read(node, turn) for node in region.inputs]
        for node in region.outputs:
            value = node.meta["val"]
            self._made((node, 0), turn, value.numel() * value.itemsize)
            arguments.append(self._tensor(node))
        if region.reserved:
            number = (region.outputs[0], 1)
            self._made(number, turn, FLOAT)
            self._tensors[number] = self._add(_describe(torch.empty(1)))
            arguments.append(self._tensors[number])
        self._instructions.append(schema.Instruction(schema.DelegateCall(len(self._blobs), arguments)))
        self._blobs.append(region.data)
        self._delegated += region.values


def _to_plain(value: object, text: str) -> object:
    """Return an argument as a program stores it: dtypes as ExecuTorch's numbers, layouts and devices as 0.

    ``text`` is the argument's type in the schema; numbers become floats if it is ``float``.
    """
    if isinstance(value, torch.dtype):
        return _number_of(value)
    if isinstance(value, (torch.layout, torch.device, torch.memory_format)):
        return 0
    if text in {"float", "Optional[float]"} and isinstance(value, (int, float)):
        return float(value)
    return value


def _number_of(dtype: torch.dtype) -> int:
    return LEAVING[dtype][0] if dtype in LEAVING else TYPES[dtype]


def _plain(value: object) -> Any:
    if value is None:
        return schema.Null()
    if isinstance(value, bool):
        return schema.Bool(value)
    if isinstance(value, int):
        return schema.Int(value)
    if isinstance(value, float):
        return schema.Double(value)
    if isinstance(value, str):
        return schema.String(value)
    raise TypeError(f"no plain value: {value!r}")


def _describe(value: Tensor, dtype: torch.dtype | None = None) -> schema.Tensor:
    return schema.Tensor(
        scalar_type=ScalarType(_number_of(dtype or value.dtype)),
        storage_offset=0,
        sizes=list(value.shape),
        dim_order=list(range(value.dim())),
        requires_grad=False,
        layout=0,
        data_buffer_idx=0,
        allocation_info=None,
        shape_dynamism=schema.TensorShapeDynamism.STATIC,
    )


def _as_tensor(value: float | int | bool, node: fx.Node) -> Tensor:
    """Return a number as a tensor, with the dtype of torch's promotion next to the tensors that ``node`` reads."""
    others = [read.meta["val"].dtype for read in node.all_input_nodes if isinstance(read.meta["val"], Tensor)]
    like = others[0] if others else torch.float32
    if isinstance(value, float) and not like.is_floating_point:
        like = torch.float32
    if isinstance(value, int) and not isinstance(value, bool) and like is torch.bool:
        like = torch.int64
    return torch.tensor(value, dtype=like)
