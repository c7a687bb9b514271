"""A power cut at any instant loses no update that was acknowledged, and no round that followed from it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from edgefl.errors import EdgeflError
from edgefl.wire.limits import Limits
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import UpdateFiles
from tests.conftest import BrokerProcess
from tests.power import served
from tests.power.disk import crash_states, lay_out
from tests.power.recorder import Op, record
from tests.server.fleet import ScriptedDevice


@pytest.fixture
def devices(mosquitto: BrokerProcess, federation: str, limits: Limits) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        for name in served.DEVICES:
            stack.callback(ScriptedDevice(mosquitto.address, federation, name, limits).stop)
        yield stack


@pytest.mark.slow
def test_no_crash_state_loses_an_acknowledged_update(
    devices: ExitStack, mosquitto: BrokerProcess, federation: str, tmp_path: Path
) -> None:
    root = (tmp_path / "runs").resolve()
    root.mkdir()
    ops = record(
        served.__name__, [str(mosquitto.port), federation, str(root / "out")], root, tmp_path / "log"
    )
    told = [_acknowledged(op) for op in ops]
    assert sum(told) == served.ROUNDS * len(served.DEVICES), "each update is acknowledged once"

    lost, states = [], 0
    for done, kept, state in crash_states(ops, root, since=told.index(True) + 1, seed=1):
        acknowledged = sum(told[:done])
        states += 1
        folder = tmp_path / "after"
        folder.mkdir()
        lay_out(state, root, folder)
        if (found := _kept(folder / "out", federation)) < acknowledged:
            lost.append(f"cut at {ops[done:][:1]!s:.200}, {kept} kept: {found} of {acknowledged}")
        shutil.rmtree(folder)
    assert states > 50
    assert lost == []


def _acknowledged(op: Op) -> bool:
    return op.kind == "mark" and b"/acks" in op.data and b"accepted" in op.data


def _kept(out: Path, federation: str) -> int:
    """Updates that a server finds here: in the model of the rounds that ended, and in the journal."""
    try:
        with closing(
            Journal(f"sqlite:///{out / 'journal.sqlite'}", federation, UpdateFiles(out / "updates"))
        ) as journal:
            run = journal.latest_run()
            if run is None:
                return 0
            Checkpoints(out).load(run.number - 1)
            reports = 0
            for number, state, outcome in journal.outcomes(run.run):
                if state == "open":
                    updates = list(journal.accepted(run.run, number))
                    assert all(hashlib.sha256(each.data).hexdigest() == each.sha256 for each in updates)
                    reports += len(updates)
                else:
                    reports += outcome["reports"]
            if run.number > 1:
                file = Checkpoints(out).path(run.number - 1).read_bytes()
                assert (
                    hashlib.sha256(file).hexdigest()
                    == journal.outcome(run.run, run.number - 1)[1]["weights_sha256"]
                )
            return reports
    except EdgeflError:
        return 0
