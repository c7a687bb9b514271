"""An engine in a process of its own: the same results, and a crash that costs a round."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.limits import Limits
from edgefl_device.engine import open_engine
from edgefl_device.round import offline
from edgefl_device.sandbox import process as sandbox
from edgefl_device.sandbox.messages import StateTensors, TensorHeader
from edgefl_device.sandbox.process import SandboxedEngine, open_sandboxed
from tests.device_runtime import tiny
from tests.device_runtime.agent.agents import StartAgent
from tests.device_runtime.agent.scripted import ScriptedServer
from tests.device_runtime.tiny import World
from tests.support.errors import BundleError, ConfigError, RoundDeclined, refuses
from tests.wire.mqtt.events import wait_until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def boxed(tmp_path: Path) -> Iterator[SandboxedEngine]:
    engine = open_sandboxed(
        "onnx", 1, 0, pages=tmp_path / "pages", memory_bytes=1 << 28, limits=Limits(max_step_s=30.0)
    )
    yield engine
    engine.rest()


def pid_of(engine: SandboxedEngine) -> int:
    assert engine._process is not None
    return engine._process.process.pid


def start_graph() -> tuple[Graph, bytes]:
    bundle = tiny.make_bundle()
    graph = bundle.manifest.graph(bundle.manifest.start)
    return graph, bundle.blobs[graph.blob.sha256]


def feeds_of(graph: Graph) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {port.name: np.ones(port.shape, port.dtype) for port in graph.inputs if port.role != "state"}


def test_a_round_gives_the_same_bits_as_in_this_process(boxed: SandboxedEngine) -> None:
    bundle, weights = tiny.make_bundle(), {k: v for unit in tiny.weights().values() for k, v in unit.items()}
    here, there = (
        offline.train_round(bundle, weights, tiny.local(), engine, seed=7)
        for engine in (open_engine("onnx"), boxed)
    )
    assert there.metrics == here.metrics
    for name, array in here.update.items():
        np.testing.assert_array_equal(there.update[name], array)
    assert boxed.used_bytes() > 0


def test_it_says_what_its_engine_is(boxed: SandboxedEngine) -> None:
    engine = open_engine("onnx")
    assert (boxed.name, boxed.version, boxed.format) == (engine.name, engine.version, engine.format)
    assert boxed.thread_counts == tuple(engine.thread_counts)


def test_an_error_of_the_engine_comes_as_it_is_and_the_process_stays(boxed: SandboxedEngine) -> None:
    graph, artifact = start_graph()
    before = pid_of(boxed)
    with pytest.raises(BundleError, match="cannot load graph"):
        boxed.load(graph, b"no model")
    boxed.load(graph, artifact)
    assert pid_of(boxed) == before
    with refuses(ConfigError, engine="tensor", threads=1):
        open_sandboxed("tensor", 1, 0, pages=Path(), memory_bytes=0, limits=Limits())


def test_state_that_is_let_go_of_is_forgotten_there(boxed: SandboxedEngine) -> None:
    graph, artifact = start_graph()
    loaded = boxed.load(graph, artifact)
    state = loaded.run(feeds_of(graph), {}).state
    values = boxed.read_state(state)
    for _ in range(3):
        state = boxed.write_state(values)
    np.testing.assert_equal(boxed.read_state(state), values)
    process = boxed._process
    assert process is not None and len(process._gone) <= len(values)


def test_a_crash_costs_only_what_was_computed(boxed: SandboxedEngine) -> None:
    graph, artifact = start_graph()
    loaded = boxed.load(graph, artifact)
    state = loaded.run(feeds_of(graph), {}).state
    os.kill(pid_of(boxed), signal.SIGSEGV)
    with pytest.raises(RoundDeclined, match="SIGSEGV") as declined:
        loaded.run(feeds_of(graph), {})
    assert declined.value.reason == "crashed"
    again = boxed.load(graph, artifact)
    assert again.run(feeds_of(graph), {}).state
    with pytest.raises(RoundDeclined, match="ended"):
        boxed.read_state(state)


def opened_in(folder: Path, code: str, **variables: str) -> str:
    """What ``code`` prints, with an engine ``e`` in a process of its own, in a program that is started in ``folder``."""
    script = (
        "import os, sys; from pathlib import Path; import numpy as np\n"
        f"{variables.pop('first', '')}\n"
        "from edgefl_device.sandbox.process import open_sandboxed\n"
        "from edgefl.wire.limits import Limits\n"
        "e = open_sandboxed('onnx', 1, 0, pages=Path('store/engine'), memory_bytes=0, limits=Limits())\n"
        f"{code}\n"
    )
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_it_starts_from_any_folder_and_by_any_way_to_its_packages(tmp_path: Path) -> None:
    """Installed or not: the way there may be a variable, or known to the agent alone."""
    code = "s = e.write_state({'a': np.ones(2)}); print(e.read_state(s)['a'].sum()); e.rest()"
    assert opened_in(tmp_path, code, PYTHONPATH=str(ROOT)) == "2.0"
    assert opened_in(tmp_path, code, first=f"sys.path.insert(0, {str(ROOT)!r})") == "2.0"
    assert opened_in(ROOT, code.replace("e.rest()", "")) == "2.0"


def test_a_module_beside_the_agent_or_its_pages_is_not_run(tmp_path: Path) -> None:
    """Its process imports before it is confined: what it finds first must not be what a graph or a stranger left."""
    (tmp_path / "store" / "engine").mkdir(parents=True)
    code = "print('started')"
    for folder in (tmp_path, tmp_path / "store" / "engine"):
        (folder / "msgspec.py").write_text("raise SystemExit(7)")
    first = f"sys.path[:] = [each for each in sys.path if each]; sys.path.insert(0, {str(ROOT)!r})"
    assert opened_in(tmp_path, code, first=first) == "started"


def test_it_works_in_the_folder_of_its_pages_which_is_empty_at_first(tmp_path: Path) -> None:
    pages = tmp_path / "engine"
    (pages / "deeper").mkdir(parents=True)
    for left in (pages / "left", pages / "deeper" / "left"):
        left.write_text("of a process before")
    engine = open_sandboxed("onnx", 1, 0, pages=pages, memory_bytes=0, limits=Limits())
    assert Path(f"/proc/{pid_of(engine)}/cwd").resolve() == pages.resolve()
    assert not list(pages.iterdir())
    engine.rest()


def test_what_it_complains_of_as_it_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no module named so')"]

    monkeypatch.setattr("edgefl_device.sandbox.process.command", broken)
    with pytest.raises(RoundDeclined, match=r"exited with code 1: .*no module named so"):
        open_sandboxed("onnx", 1, 0, pages=tmp_path / "pages", memory_bytes=0, limits=Limits())


def test_a_step_that_never_ends_is_ended(tmp_path: Path) -> None:
    engine = open_sandboxed("onnx", 1, 0, pages=tmp_path, memory_bytes=0, limits=Limits(max_step_s=0.3))
    graph, artifact = start_graph()
    loaded = engine.load(graph, artifact)
    os.kill(pid_of(engine), signal.SIGSTOP)
    with pytest.raises(RoundDeclined, match=r"longer than 0\.3 s \(limits\.max_step_s\)"):
        loaded.run(feeds_of(graph), {})


def test_a_process_that_stops_reading_is_ended(tmp_path: Path) -> None:
    limits = Limits(max_step_s=0.3)
    engine = open_sandboxed("onnx", 1, 0, pages=tmp_path / "pages", memory_bytes=0, limits=limits)
    os.kill(pid_of(engine), signal.SIGSTOP)
    with pytest.raises(RoundDeclined, match=r"longer than 0\.3 s"):
        engine.write_state({"large": np.zeros(1 << 22)})  # more than a pipe holds


def test_what_it_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses it no process."""
    place = tmp_path / "child"
    code = f"import os\nchild = os.fork()\nif child: open({str(place)!r}, 'w').write(str(child))\n"
    code += "import edgefl_device.sandbox.child as it\nit.main() if child else __import__('time').sleep(60)"
    monkeypatch.setattr("edgefl_device.sandbox.process.command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = open_sandboxed("onnx", 1, 0, pages=tmp_path / "pages", memory_bytes=0, limits=Limits())
    below = Path(f"/proc/{place.read_text()}")
    assert below.exists()
    engine.rest()
    wait_until(lambda: not below.exists() or "Z" in (below / "stat").read_text().split()[2], "it ends")


def test_the_process_outlives_the_thread_that_started_it(boxed: SandboxedEngine) -> None:
    graph, artifact = start_graph()
    boxed.rest()
    starter = threading.Thread(target=boxed.write_state, args=({"a": np.ones(1)},))
    starter.start()
    starter.join()
    before = pid_of(boxed)
    assert boxed.load(graph, artifact).run(feeds_of(graph), {}).state and pid_of(boxed) == before


def test_the_process_ends_with_the_agent_also_in_a_step_without_end(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from edgefl_device.sandbox.process import open_sandboxed\n"
        "from edgefl.wire.limits import Limits\n"
        "e = open_sandboxed('onnx', 1, 0, pages=Path(sys.argv[1]), memory_bytes=0, limits=Limits())\n"
        "print(e._process.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    process = Path(f"/proc/{int(done.stdout)}")
    while process.exists() and "Z" not in (process / "stat").read_text().split()[2]:
        time.sleep(0.05)


def test_an_agent_survives_a_crash_of_its_engine(
    server: ScriptedServer, start: StartAgent, endless: World, world: World, boxed: SandboxedEngine
) -> None:
    agent = start(engine=boxed)
    server.open(endless)
    server.progress()
    os.kill(pid_of(boxed), signal.SIGKILL)
    assert server.decline().reason == "crashed"
    assert "out of memory" in agent.event("declined").text
    server.open(world, number=2)
    update = server.update(2)
    assert update.nonce == "n2" and agent.alive
    used = update.profile.peak_bytes - update.profile.idle_bytes
    assert 0 < used < 16 << 20, "anonymous memory alone, above the idle agent and the idle process"


def test_an_agent_with_a_confined_engine_measures_so(start: StartAgent, boxed: SandboxedEngine) -> None:
    measure = start(engine=boxed).agent.profiles.profiler.measure
    child = measure.__self__  # type: ignore[attr-defined]
    assert child.confinement == boxed.confinement and child.confinement.memory_bytes
    assert sandbox.confinement(open_engine("onnx")) is None


def test_an_answer_of_another_shape_ends_the_process_and_not_the_agent(boxed: SandboxedEngine) -> None:
    graph, artifact = start_graph()
    loaded = boxed.load(graph, artifact)
    loaded._keeps = {}  # as if the process named other state
    with pytest.raises(RoundDeclined, match="cannot be read"):
        loaded.run(feeds_of(graph), {})
    wrong = msgspec.structs.replace(graph.inputs[0], shape=(9, 9))
    with refuses(BundleError, port="weights.head.w"):
        boxed.load(graph, artifact).run({**feeds_of(graph), graph.inputs[0].name: np.ones(wrong.shape)}, {})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "told",
    [
        TensorHeader(name="a", dtype="<f4", shape=(1 << 40,)),
        TensorHeader(name="a", dtype="<f4", shape=(3,)),
        TensorHeader(name="a", dtype="<f8", shape=(2,)),
        TensorHeader(name="a", dtype="|O", shape=(2,)),
        TensorHeader(name="b", dtype="<f4", shape=(2,)),
    ],
)
def test_state_that_is_told_in_another_form_than_it_has_ends_the_process(
    boxed: SandboxedEngine, told: TensorHeader, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = boxed.write_state({"a": np.ones(2, np.float32)})
    process = boxed._process
    assert process is not None
    monkeypatch.setattr(process, "ask", lambda *_: StateTensors(tensors=(told,)))
    monkeypatch.setattr(process, "array", lambda *_: pytest.fail("room was made for it"))
    with pytest.raises(RoundDeclined, match="cannot be read"):
        boxed.read_state(state)


def test_an_answer_that_there_is_no_memory_for_declines_the_round(boxed: SandboxedEngine) -> None:
    boxed.write_state({"a": np.ones(2, np.float32)})
    process = boxed._process
    assert process is not None
    with pytest.raises(RoundDeclined, match="no memory"):
        process.array("float32", (1 << 60,))
