"""A power cut at any instant loses no update that a device has begun to send, nor what it carries to later rounds."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgefl.errors import StoreError
from edgefl_device.store.database import Store
from tests.power import stored
from tests.power.disk import crash_states, lay_out
from tests.power.recorder import Op, record


def test_no_crash_state_loses_an_update_that_was_sent(tmp_path: Path) -> None:
    root = (tmp_path / "device").resolve()
    root.mkdir()
    ops = record(stored.__name__, [str(root / "home" / "store")], root, tmp_path / "log")
    sends = [_sends(op) for op in ops]
    assert [nonce for nonce in sends if nonce] == [f"nonce-{n + 1}" for n in range(stored.ROUNDS)]

    lost, states = [], 0
    first = next(at for at, nonce in enumerate(sends) if nonce)
    for done, kept, state in crash_states(ops, root, since=first + 1, seed=1):
        states += 1
        folder = tmp_path / "after"
        folder.mkdir()
        lay_out(state, root, folder)
        expected = {nonce for nonce in sends[:done] if nonce}
        if missing := expected - _kept(folder / "home" / "store"):
            lost.append(f"cut at {ops[done:][:1]!s:.200}, {kept} kept: {sorted(missing)}")
        shutil.rmtree(folder)
    assert states > 20
    assert lost == []


def _sends(op: Op) -> str:
    text = op.data.decode(errors="replace").strip() if op.kind == "mark" else ""
    return text.removeprefix("sends ") if text.startswith("sends ") else ""


def _kept(folder: Path) -> set[str]:
    """Nonces whose update waits or is known to be settled, and whose carry is there."""
    try:
        store = Store(folder, limit_bytes=stored.LIMIT_BYTES, history_rounds=10)
    except StoreError:
        return set()
    try:
        nonces = [f"nonce-{number + 1}" for number in range(stored.ROUNDS)]
        held = {nonce for nonce in nonces if store.waits(nonce) or store.past(nonce) is not None}
        newest = max(held, default="")
        return held if newest and newest in {carry.nonce for carry in store.carries()} else set()
    finally:
        store.close()
