"""Programs whose outputs lie in their own arena: they run through load and execute alone, and compute the same bits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import edgefl
from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec, role_of
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.formats import EXECUTORCH_DTYPES
from edgefl.wire.bundle.manifest import PLANNED, Graph, decode_manifest, encode_manifest
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.base import Engine
from edgefl_device.engine.executorch.build import LIBRARIES, find_wheel
from tests import needs
from tests.exporters.examples import small_net, step_of
from tests.exporters.executorch.test_program import momentum, swap
from tests.parity.forms import Made, engine_of, made
from tests.parity.test_device_round import CASES, OPTIONS, functions, submodel
from tests.support.errors import BundleError, ConfigError, refuses

STEPS = 3
_SOURCE = Path(__file__).with_name("load_and_execute.cpp")
_NUMBERS = {name: number for number, name in EXECUTORCH_DTYPES.items()}


def net() -> Function:
    torch.manual_seed(0)
    return step_of(small_net(), (3, 8, 8))


def of_all_types() -> Function:
    """Whole numbers, truth values and a view of the state leave it, too; one output is another's memory in other words."""

    def fn(t: Tensors) -> Tensors:
        w = t["state.w"] * 0.5 + t["batch.0.x"]
        return {
            "state.w": w,
            "state.count": t["state.count"] + 1,
            "update.flat": w.reshape(-1),
            "update.signs": w > 0,
            "update.bytes": (w.abs() * 10).to(torch.uint8),
            "metric.loss": (w * w).mean(),
        }

    specs = {"state.w": TensorSpec((4, 6)), "state.count": TensorSpec((), torch.int64)}
    return Function("train", fn, {**specs, "batch.0.x": TensorSpec((4, 6))})


FUNCTIONS: dict[str, Callable[[], Function]] = {
    "network": net,
    "momentum": momentum,
    "swap": swap,
    "all types": of_all_types,
}
each = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of("executorch")


@pytest.fixture(scope="module")
def load_and_execute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, which knows of ExecuTorch its Module alone, as Android's Kotlin class does."""
    program, wheel = tmp_path_factory.mktemp("module") / "load_and_execute", find_wheel()
    include = wheel.root / "include"
    command = [
        needs.require("c++"),
        "-std=c++17",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        str(_SOURCE),
        "-o",
        str(program),
    ]
    for folder in (include, include / "executorch/runtime/core/portable_type/c10"):
        command += ["-isystem", str(folder)]
    # The kernels register themselves, and nothing asks for them by name.
    command += [f"-L{wheel.root / 'lib'}", f"-Wl,--no-as-needed,-rpath,{wheel.root / 'lib'}"]
    subprocess.run([*command, *(f"-l{name}" for name in LIBRARIES)], check=True, timeout=300)
    return program


def given(exported: Made, function: Function) -> Arrays:
    example = function.example(3)
    return {port.name: example[port.name].contiguous().numpy() for port in exported.graph.inputs}


def engine_steps(
    engine: Engine, exported: Made, arrays: Mapping[str, np.ndarray], steps: int = STEPS
) -> Arrays:
    """What the device's engine has after some steps."""
    graph = engine.load(exported.graph, exported.model)
    fed = {name: array for name, array in arrays.items() if role_of(name) != "state"}
    state = engine.write_state({name: array for name, array in arrays.items() if role_of(name) == "state"})
    for _ in range(steps):
        outputs = graph.run(fed, state)
        state = {**state, **outputs.state}
    return {**engine.read_state(state), **outputs.arrays}


def module_steps(
    program: Path, exported: Made, arrays: Mapping[str, np.ndarray], folder: Path
) -> dict[str, bytes]:
    """What Module has after as many."""
    (folder / "model.pte").write_bytes(exported.model)
    names = [port.name for port in exported.graph.inputs]
    lines = [str(len(names))]
    for at, port in enumerate(exported.graph.inputs):
        (folder / f"in{at}").write_bytes(arrays[port.name].tobytes())
        sizes = " ".join(map(str, port.shape))
        lines.append(f"{folder}/in{at} {_NUMBERS[port.dtype]} {len(port.shape)} {sizes}")
    lines.append(str(len(exported.graph.outputs)))
    for at, port in enumerate(exported.graph.outputs):
        lines.append(f"{names.index(port.name) if port.name in names else -1} {folder}/out{at}")
    (folder / "ports").write_text("\n".join(lines))
    command = [str(program), str(folder / "model.pte"), str(folder / "ports"), str(STEPS)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return {port.name: (folder / f"out{at}").read_bytes() for at, port in enumerate(exported.graph.outputs)}


@pytest.mark.sample(2)
@each
def test_load_and_execute_alone_give_the_bits_of_state_in_place(
    name: str, engine: Engine, load_and_execute: Path, tmp_path: Path
) -> None:
    function = FUNCTIONS[name]()
    planned = made("executorch", function, "planned")
    arrays = given(planned, function)

    found = module_steps(load_and_execute, planned, arrays, tmp_path)

    expected = engine_steps(engine, made("executorch", function), arrays)
    assert {port: array.tobytes() for port, array in expected.items()} == found


def test_a_program_without_memory_ends_the_process(load_and_execute: Path, tmp_path: Path) -> None:
    function = momentum()
    exported = made("executorch", function)

    with pytest.raises(subprocess.CalledProcessError):
        module_steps(load_and_execute, exported, given(exported, function), tmp_path)


@each
def test_the_devices_engine_runs_both_with_the_same_bits(name: str, engine: Engine) -> None:
    function = FUNCTIONS[name]()
    planned, plain = made("executorch", function, "planned"), made("executorch", function)
    arrays = given(planned, function)

    found, expected = engine_steps(engine, planned, arrays), engine_steps(engine, plain, arrays)

    assert planned.graph.planned_outputs
    assert not plain.graph.planned_outputs
    assert found.keys() == expected.keys()
    assert all(found[port].tobytes() == expected[port].tobytes() for port in expected)


def test_state_is_copied_over_the_old_one(engine: Engine) -> None:
    function = swap()
    planned = made("executorch", function, "planned")
    state = engine.write_state(given(planned, function))
    before = {name: array.ctypes.data for name, array in state.items()}

    after = engine.load(planned.graph, planned.model).run({}, state).state

    assert made("executorch", function).graph.in_place == ()
    assert {name: array.ctypes.data for name, array in after.items()} == before


def test_what_a_run_returned_stays_as_it_is_in_the_next_one(engine: Engine) -> None:
    function = of_all_types()
    planned = made("executorch", function, "planned")
    arrays = given(planned, function)
    graph = engine.load(planned.graph, planned.model)
    state = engine.write_state({name: arrays[name] for name in ("state.w", "state.count")})

    first = graph.run({"batch.0.x": arrays["batch.0.x"]}, state)
    kept = first.arrays["update.flat"].copy()
    graph.run({"batch.0.x": arrays["batch.0.x"] + 1}, first.state)

    np.testing.assert_array_equal(first.arrays["update.flat"], kept)


@pytest.mark.parametrize("outputs", ["caller", "planned"])
def test_a_manifest_that_says_otherwise_is_refused(outputs: str, engine: Engine) -> None:
    exported = made("executorch", momentum(), outputs)  # type: ignore[arg-type]
    wrong = msgspec.structs.replace(exported.graph, planned_outputs=outputs == "caller")

    where = {"caller": "the caller's memory", "planned": "memory that the program planned itself"}[outputs]
    with pytest.raises(BundleError, match=f"state.m: it is in {where}.*export the bundle again"):
        engine.load(wrong, exported.model)


# -- bundles ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle() -> edgefl.Bundle:
    return edgefl.compile(
        edgefl.Model(nn.Linear(6, 3), sample=(6,), classes=3),
        options=edgefl.CompileOptions(target="executorch", outputs="planned"),
    )


def test_graphs_with_planned_outputs_have_a_version_of_their_own(bundle: edgefl.Bundle) -> None:
    manifest = bundle.manifest

    assert manifest.v == PLANNED
    assert all(graph.planned_outputs for graph in manifest.graphs)
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_manifest_of_version_1_cannot_have_planned_outputs(bundle: edgefl.Bundle) -> None:
    wrong = msgspec.structs.replace(bundle.manifest, v=1)

    with pytest.raises(BundleError, match="planned outputs in a manifest of version 1, which is 4 then"):
        decode_manifest(encode_manifest(wrong))


def test_a_graph_of_another_format_cannot_have_planned_outputs(bundle: edgefl.Bundle) -> None:
    def as_onnx(graph: Graph) -> Graph:
        return msgspec.structs.replace(graph, format="onnx")

    graphs = tuple(as_onnx(graph) for graph in bundle.manifest.graphs)
    wrong = msgspec.structs.replace(bundle.manifest, graphs=graphs)

    with pytest.raises(BundleError, match="only a program of format executorch"):
        decode_manifest(encode_manifest(wrong))


def test_planned_outputs_of_onnx_graphs_are_refused() -> None:
    with refuses(ConfigError, formats=("onnx",)):
        edgefl.compile("mlp", options=edgefl.CompileOptions(outputs="planned"))


def test_both_forms_of_a_bundle_lie_in_the_cache_under_names_of_their_own(bundle: edgefl.Bundle) -> None:
    other = edgefl.compile(
        edgefl.Model(nn.Linear(6, 3), sample=(6,), classes=3),
        options=edgefl.CompileOptions(target="executorch"),
    )

    assert other.manifest.v == 1
    assert other.digest != bundle.digest


@pytest.mark.slow
@pytest.mark.parametrize(("name", "net"), CASES)
def test_every_function_of_every_program_gives_the_same_bits(name: str, net: str, engine: Engine) -> None:
    program = algorithms.build(
        name, Objective.of(submodel(name, net)), batch=4, steps=3, **OPTIONS.get(name, {})
    )

    for function in functions(program).values():
        planned, plain = made("executorch", function, "planned"), made("executorch", function)
        arrays = given(planned, function)
        found, expected = (engine_steps(engine, each, arrays, steps=1) for each in (planned, plain))
        assert {port: found[port].tobytes() for port in expected} == {
            port: array.tobytes() for port, array in expected.items()
        }
