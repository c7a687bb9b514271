"""A journal that keeps updates and cannot say so, as a database whose link breaks at the commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import StoreError
from edgefl_server.events import Rejected, RoundClosed, Warned
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_table import AcceptedUpdate
from tests.server.fleet import PATIENCE_S, MakeDevice, assert_mean, silent


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices of the first updates that the journal keeps: nobody hears of that."""
    devices: list[str] = []
    accept = Journal.accept

    def kept(journal: Journal, run: str, number: int, updates: Sequence[AcceptedUpdate]) -> None:
        accept(journal, run, number, updates)
        if not devices:
            devices.extend(each.assignment.device for each in updates)
            raise StoreError("the link was cut")

    monkeypatch.setattr(Journal, "accept", kept)
    return devices


def test_an_unheard_commit_counts_once(
    device: MakeDevice, serve: Any, cut: list[str], tmp_path: Path
) -> None:
    devices = {name: device(name, silent) for name in ("strong-0", "strong-1")}
    server = serve(rounds=1, min_devices=2)
    for each in devices.values():
        opened, task = each.wait_open(), each.tasks.get(timeout=PATIENCE_S)
        each.report(task, opened)
        assert each.acks.get(timeout=PATIENCE_S).status == "accepted"  # which sends nothing again
    closed = server.wait_for(RoundClosed)
    server.join()

    assert cut == ["strong-0"] and not server.seen_of(Rejected)
    assert any("the link was cut" in warned.text for warned in server.seen_of(Warned))
    assert closed.reports == 2
    assert_mean(tmp_path / "out", [(each, "strong", 1) for each in devices])
