"""A round that sums up data, by a real service over a real broker: exact sums, refusals, dropouts, no weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.config import parse
from edgefl.data.dataset import Dataset
from edgefl.setup.model import data_spec
from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import POLICY, Decline, Round, Task, encode
from edgefl.wire.statistics import StatisticsRequest
from edgefl_device.data.samples import LocalData
from edgefl_device.engine import open_engine
from edgefl_device.round.offline import train_round
from edgefl_server.compose import compose_statistics
from edgefl_server.events import DataStatistics, Finished, RoundClosed
from edgefl_server.run_spec import RunSpec
from tests.server.fleet import PATIENCE_S, MakeDevice, ScriptedDevice, Serve, silent, update_for

ROWS = 40
EDGES = (0.0, 0.5, 1.0)


def rows_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(int(name.rpartition("-")[2]))
    return rng.integers(0, 256, (ROWS, 2, 4, 4), np.uint8), rng.integers(0, 3, ROWS)


def dataset() -> Dataset:
    x, y = rows_of("any-99")
    return Dataset("the test", x, y, x, y, 1 / 255, 0.0, 3)


@pytest.fixture
def spec(federation: str, tmp_path: Path) -> RunSpec:
    tables = {
        "federation": {"name": federation},
        "tiers": {name: {"devices": [f"{name}-*"]} for name in ("strong", "weak")},
        "round": {"min_devices": 5},
        "evaluate": {"least_group": 2},
        "limits": {"round_deadline_s": 15.0, "offline_grace_s": 1.0},
    }
    return compose_statistics(
        parse(tables, source="the test"), dataset(), StatisticsRequest(edges=EDGES), tmp_path / "composed"
    )


def answer_of(spec: RunSpec) -> object:
    """Return how an honest device answers: with the sums that its bundle computes."""

    def sum_up(device: ScriptedDevice, task: Task, opened: Round) -> None:
        x, y = rows_of(device.name)
        bundle = spec.tiers[task.tier].bundle
        result = train_round(bundle, {}, LocalData(x, y, device.name), open_engine("onnx"))
        sent = update_for(
            device.name,
            task,
            opened.model_version,
            {},
            samples=ROWS,
            tensors=tensors.dump(result.update),
            metrics={},
        )
        device.send(encode(sent), task)

    return sum_up


def refuses(device: ScriptedDevice, task: Task, _opened: Round) -> None:
    device.say(device.mine.declines, Decline(round=task.round, nonce=task.nonce, reason=POLICY))


def drops_out(device: ScriptedDevice, _task: Task, _opened: Round) -> None:
    device.vanish()


def statistics_of(closed: RoundClosed) -> DataStatistics:
    assert closed.statistics is not None
    return closed.statistics


def assert_sums_of(found: DataStatistics, *names: str) -> None:
    """Compare with numpy on the rows of these devices, all of one tier or one of another."""
    x = np.concatenate([rows_of(name)[0] for name in names]).astype(np.float32) * np.float32(1 / 255)
    y = np.concatenate([rows_of(name)[1] for name in names])
    everyone = found.devices
    assert everyone is not None and (everyone.devices, everyone.rows) == (len(names), len(y))
    assert everyone.classes == tuple(np.bincount(y, minlength=3).tolist())
    assert everyone.mean == pytest.approx(x.mean((0, 2, 3), np.float64), abs=1e-8)
    assert everyone.deviation == pytest.approx(x.std((0, 2, 3), np.float64), abs=1e-8)
    bins = [np.histogram(x[:, channel], EDGES)[0].tolist() for channel in range(2)]
    assert [list(each[1:-1]) for each in everyone.histogram] == bins


def test_exact_sums_although_devices_refuse_and_drop_out(
    device: MakeDevice, serve: Serve, spec: RunSpec, tmp_path: Path
) -> None:
    honest = answer_of(spec)
    watcher = device("strong-0", honest, samples=ROWS)
    device("strong-1", honest, samples=ROWS + 2), device("weak-2", honest, samples=ROWS)
    device("weak-3", refuses, samples=ROWS), device("weak-4", drops_out, samples=ROWS)
    running = serve(spec, evaluate=True)
    opened = watcher.wait_open(1)
    closed = running.wait_for(RoundClosed)
    finished = running.wait_for(Finished)
    running.join()

    found = statistics_of(closed)
    assert_sums_of(found, "strong-0", "strong-1", "weak-2")
    assert (found.tiers.keys(), found.left_out) == ({"strong"}, ("weak",))
    assert found.announced_rows == 3 * ROWS + 2
    assert not opened.units and closed.evaluation is None
    assert (finished.rounds, finished.model, finished.accuracy) == (1, "", None)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_server_that_is_stopped_resumes_the_round(device: MakeDevice, serve: Serve, spec: RunSpec) -> None:
    honest = answer_of(spec)
    for name in ("strong-0", "strong-1", "strong-2"):
        device(name, honest, samples=ROWS)
    late = device("weak-3", silent, samples=ROWS)
    device("weak-4", refuses, samples=ROWS)
    first = serve(spec, evaluate=True)
    late.wait_open(1)
    task = late.tasks.get(timeout=PATIENCE_S)
    first.stop()

    second = serve(spec, evaluate=True)
    again = late.tasks.get(timeout=PATIENCE_S)
    assert again == task
    honest(late, again, late.wait_open(1))  # type: ignore[operator]
    found = statistics_of(second.wait_for(RoundClosed))
    second.join()
    assert_sums_of(found, "strong-0", "strong-1", "strong-2", "weak-3")


def test_a_round_without_reports_has_no_result(device: MakeDevice, serve: Serve, spec: RunSpec) -> None:
    for number in range(5):
        device(f"strong-{number}", refuses, samples=ROWS)
    running = serve(spec, evaluate=True)
    closed = running.wait_for(RoundClosed)
    running.join()
    assert (closed.outcome, closed.statistics) == ("abandoned", None)


def test_samples_and_labels_have_the_datas_shape(spec: RunSpec) -> None:
    manifest = spec.tiers["strong"].bundle.manifest
    assert manifest.data == data_spec(dataset()) and manifest.suffix == () and manifest.parameters == 0
