"""Measure the memory of a real agent in one round of a bundle.

The agent is started as on a device, with a broker of its own. Memory is read from the system while the agent works, so
that any agent can be measured, in whatever language.

::

    with running_broker(folder) as broker:
        row = measured(["edgefl", "device"], read_bundle(path), broker, folder)
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import sub
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.system.memory import status_bytes
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, split
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.mqtt.messages import Offer
from edgefl_conformance.material.bundles import Material
from edgefl_conformance.play.broker import Broker
from edgefl_conformance.play.harness import CampaignState, Play, RoundHarness
from edgefl_device.profile.measure.inputs import RandomInputs

SAMPLE_S = 0.001
"""Seconds between two readings: a kernel's workspace lives for some milliseconds."""
SETTLED_S = 1.5
"""An agent that said Hello is idle after so many seconds."""
WITHIN_S = 120.0
ROWS = 4
"""Local rows, in batches."""


class RoundMemory(msgspec.Struct, frozen=True):
    """Bytes above the idle agent at the peak of a round.

    ``anonymous`` is memory that no file backs, ``mapped`` pages of files, which the system may drop at any time.
    ``writable`` is what RLIMIT_DATA counts: private writable mappings, whether their pages were touched or not.
    ``finished``: the agent sent its update.
    """

    anonymous: int
    mapped: int
    writable: int
    idle_anonymous: int
    finished: bool
    words: str = ""


def measured(
    command: Sequence[str],
    bundle: BundleArchive,
    broker: Broker,
    folder: Path,
    *,
    memory_bytes: int = 0,
    limit_bytes: int = 0,
) -> RoundMemory:
    """Run one round of ``bundle`` by the agent that ``command`` starts.

    Args:
        command: starts the agent; the options of `edgefl device` are appended.
        bundle: a tier's, in the format of the engine to measure.
        broker: a running one.
        folder: for the agent's store and logs.
        memory_bytes: what the agent offers to training; by default what its machine has.
        limit_bytes: RLIMIT_DATA of the agent above its idle self; 0 for none.

    Returns:
        The peaks, whether the round was finished or not.
    """
    harness = _MemoryHarness(CampaignState(command, bundle.manifest.format, broker, folder), bundle)
    try:
        options = ["--memory", f"{memory_bytes}B"] if memory_bytes else []
        pid = harness.start(*options).pid
        time.sleep(SETTLED_S)
        idle = _reading(pid)
        if limit_bytes:
            most = idle[-1] + limit_bytes
            resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))
        with _watched(pid) as peak:
            play = harness.give_round()
            received = harness.update_or_none(play.task, WITHIN_S, play.mark)
        if received is not None:
            harness.answer(received)
        words = "" if received else harness.instead(play.mark)
        anonymous, mapped, writable = map(sub, peak, idle)
        return RoundMemory(anonymous, mapped, writable, idle[0], received is not None, words)
    finally:
        harness.end()


def _reading(pid: int) -> list[int]:
    """Return the anonymous, mapped and writable bytes of a process."""
    return [status_bytes(field, pid) for field in ("RssAnon", "RssFile", "VmData")]


@contextmanager
def _watched(pid: int) -> Iterator[list[int]]:
    """Yield a list that holds the highest reading of the process while the block runs, once it has ended."""
    peak, done = _reading(pid), threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            peak[:] = map(max, peak, _reading(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


class _MemoryHarness(RoundHarness):
    """An agent and one round of a bundle, with data and weights that are drawn for it."""

    def __init__(self, setup: CampaignState, bundle: BundleArchive) -> None:
        super().__init__(setup, "memory")
        self._bundle = bundle
        self._inputs = RandomInputs(bundle.manifest)
        data = self._inputs.samples(ROWS * bundle.manifest.batch)
        arrays: dict[str, Any] = {"x": data.x, "y": data.y, **data.others}
        np.savez(self.folder / "data.npz", **arrays)

    def give_round(self) -> Play:
        """Publish the bundle and random weights, announce the round and give the task."""
        manifest, units = self._bundle.manifest, self._inputs.weights(self._bundle.manifest)
        for ref in manifest.blobs:
            self.server.put_chunks(ref, list(split(self._bundle.blobs[ref.sha256], ref.chunk)))
        manifest_ref = self.server.put(self._bundle.encoded)
        signature = self.server.sign_bundle(manifest_ref)
        offer = Offer(bundles={manifest.tier: manifest_ref}, signatures={manifest.tier: signature})
        masks = {p.label: p.mask for graph in manifest.graphs for p in graph.inputs_of("weights") if p.mask}
        weights: dict[str, tuple[BlobRef, ...]] = {
            unit: (self.server.put(tensors.dump(part, {key: masks[key] for key in part.keys() & masks})),)
            for unit, part in units.items()
        }
        material = Material("memory", self._bundle, units)
        announced = self.announcement(offer, weights)
        return self.give(announced, self.task(announced, material), material)
