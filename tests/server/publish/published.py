"""A downlink, and devices that rebuild what it publishes: shared by the tests of the downlink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.wire.blobs import BlobRef, decompress, describe
from edgefl.wire.mqtt.messages import Offer, Round
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.tensors import Arrays
from edgefl_device.engine.onnx import OnnxEngine
from edgefl_device.round.graph_loader import GraphLoader, RoundProfiler
from edgefl_device.round.job import Job
from edgefl_server.publish.downlink import Downlink, PublishedPart
from edgefl_server.publish.publisher import Publisher
from edgefl_server.run_spec import DownlinkSpec
from edgefl_server.storage.checkpoints import PublishedModels
from tests.server.fleet import bundle

LIMIT = 1 << 24
NAMES = frozenset({"stem.w", "head.w"})


class Nobody:
    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> Any:
        raise AssertionError("nothing is published before the broker is there")


class Server:
    """A downlink and the model it publishes; ``again`` is what starts after a kill."""

    def __init__(
        self, folder: Path, encoding: Any = "int8", every: int = 4, run: str = "run", **settings: Any
    ) -> None:
        self.folder = folder
        self.plan = DownlinkSpec(encoding, every, **settings)
        self.publisher = Publisher(Nobody(), Topics("demo"), 1000, self.plan.compression)
        self.downlink = Downlink(self.plan, self.publisher, PublishedModels(folder, run), LIMIT)

    def again(self) -> Server:
        return Server(self.folder, self.plan.encoding, self.plan.keyframe_every)

    def publish(self, number: int, parts: Mapping[str, PublishedPart] | None = None) -> None:
        self.downlink.publish(number, f"v{number}", units(number) if parts is None else parts)
        self.forget_old()

    def resume(self, number: int, parts: Mapping[str, PublishedPart] | None = None) -> None:
        self.downlink.resume(number, f"v{number}", units(number) if parts is None else parts)

    @property
    def patched(self) -> dict[str, tuple[BlobRef, ...]]:
        """What takes more than one blob."""
        return {name: refs for name, refs in self.downlink.units.items() if len(refs) > 1}

    def forget_old(self) -> None:
        """As after an announcement: what it does not name is no longer to be had."""
        self.publisher.keep_only(ref.sha256 for refs in self.downlink.units.values() for ref in refs)

    def announced(self, number: int) -> Round:
        return Round(
            run="run",
            round=number,
            state="open",
            model_version=f"v{number}",
            offers={"onnx": Offer(bundles={"strong": describe(b"", 8)})},
            units=self.downlink.units,
            hyper={},
            base=number - 1,
            deadline=0.0,
        )


def model(number: int) -> Arrays:
    """Weights after round ``number``: a random walk, statistics among them."""
    weights: Arrays = {"stem.w": np.zeros((30, 20), np.float32), "head.w": np.zeros((50, 40), np.float32)}
    weights["stem.mean"] = np.zeros(20, np.float32)
    for at in range(number + 1):
        rng = np.random.default_rng(at)
        for name, array in weights.items():
            weights[name] = array + rng.normal(size=array.shape).astype(np.float32) * 0.1
    return weights


def units(number: int) -> dict[str, PublishedPart]:
    weights = model(number)
    return {
        unit: PublishedPart({n: a for n, a in weights.items() if n.startswith(unit)}, NAMES)
        for unit in ("stem", "head")
    }


@dataclass
class Device:
    """A store, and what it had to fetch; reads units through the runtime's own code."""

    store: dict[str, bytes] = field(default_factory=dict)
    fetched: int = 0
    server: Server | None = None

    def get(self, ref: BlobRef) -> bytes:
        if ref.sha256 not in self.store:
            assert self.server is not None
            self.store[ref.sha256] = self.server.publisher.encoded(ref.sha256)
            self.fetched += ref.size
        return decompress(ref, self.store[ref.sha256], LIMIT)

    def get_all(self, refs: Sequence[BlobRef]) -> list[bytes]:
        return [self.get(ref) for ref in refs]

    def read(self, server: Server, number: int, names: Sequence[str] = ("stem", "head")) -> Arrays:
        self.server, self.fetched = server, 0
        graphs = GraphLoader(OnnxEngine(), bundle("strong").manifest, self, RoundProfiler())
        return graphs.fetch_weights(job(server.announced(number)), names)


def job(announced: Round) -> Job:
    return Job(
        run="run",
        round=announced.round,
        tier="strong",
        seed=0,
        nonce="n",
        samples=0,
        model_version=announced.model_version,
        bundle=announced.offer("onnx").bundles["strong"],
        units=announced.units,
        hyper={},
    )


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].tobytes() == other[n].tobytes() for n in one
    )


def believed(server: Server) -> Arrays:
    """What the server takes its devices to have."""
    return {name: array for line in server.downlink._lines.values() for name, array in line.r.items()}
