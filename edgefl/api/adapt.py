"""Personalization: the current model, adapted to a device's own data, over the broker or from files. Imports no torch."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.api.bundle import Bundle
from edgefl.api.device import broker_address
from edgefl.api.progress import reporting
from edgefl.errors import ConfigError
from edgefl.wire import folders
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.keys import parse_keys
from edgefl.wire.limits import Limits, check_seed
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.topics import checked_name
from edgefl.wire.tensors import Arrays
from edgefl_device.config import AgentEvent, DeviceLog
from edgefl_device.data.samples import LocalSource
from edgefl_device.engine import open_engine
from edgefl_device.personal.personalize import Adaptation, PersonalizationReport, Personalizer, graphs_of
from edgefl_device.personal.readonly_client import ReadOnlyClient, job_of
from edgefl_device.round.executor import check_manifest_ref
from edgefl_device.round.graph_loader import BlobSource
from edgefl_device.round.job import Job
from edgefl_device.round.offline import offline_job, read_weights


@dataclass(frozen=True)
class DeviceModel:
    """Model as a device downloads it, to be adapted by :func:`adapt`.

    Attributes:
        job: A device's task for one round: the round, and references to the blobs (files by digest) of its weights.
        manifest: Manifest (table of contents) of the tier's bundle.
        blobs: Source of the blobs' bytes: the network, or memory.
        folder: Folder for large temporary files.
    """

    job: Job
    manifest: Manifest
    blobs: BlobSource
    folder: Path


def of_files(bundle: Bundle, weights: Path, folder: Path | None = None) -> DeviceModel:
    """Return the model of a bundle with the weights in a file. Needs no broker.

    Args:
        bundle: bundle of a tier.
        weights: file of a model's weights, or of weights that an adaptation saved.
        folder: folder for large temporary files; None for the system's.

    Raises:
        DataError: the file does not exist or contains no weights.
        BundleError: tensors that the bundle reads are missing.
    """
    manifest = bundle.manifest
    job, blobs = offline_job(bundle.contents, read_weights(weights), graphs_of(manifest), str(weights))
    return DeviceModel(job, manifest, blobs, folder or Path(tempfile.gettempdir()))


@contextmanager
def announced(
    federation: str,
    device: str,
    *,
    broker: str | Address = "localhost:1883",
    tier: str = "",
    folder: Path | None = None,
    server_key: str = "",
    limits: Limits = Limits(),
    engine: str = "onnx",
    agent: Path | None = None,
    report: Callable[[AgentEvent], None] = lambda event: print(event.text, file=sys.stderr),
) -> Iterator[DeviceModel]:
    """Connect to the broker, and yield the model that the federation announced last, whether or not a round is open.

    The connection ends with the ``with`` block.

    Args:
        federation: name of the federation.
        device: name of this device.
        broker: ``host:port``, a URL, or an address, which may have TLS.
        tier: tier whose model is taken; "" for the only one.
        folder: folder for downloads; None for one in the agent's store.
        server_key: trusted keys of the server; "" for those that the device's agent trusts.
        limits: sizes and timeouts of messages.
        engine: runtime of the graphs, ``onnx`` or ``executorch``.
        agent: folder of the device's agent; None for its default place.
        report: receives events, such as the server's key if the agent trusts none yet.

    Raises:
        EdgeflError: no model can be downloaded or trusted.
    """
    checked_name("federation", federation)
    checked_name("device", device)
    place = folder or folders.store(federation, device) / "personalize"
    if agent is None and not server_key:
        with suppress(ConfigError):  # without a home there is no store in it
            agent = folders.store(federation, device)
    with ReadOnlyClient(
        federation,
        device,
        broker_address(broker),
        place,
        limits,
        parse_keys(server_key),
        agent=agent,
        log=DeviceLog(report),
    ) as client:
        job = job_of(client.announced(), tier, engine)
        client.trust.check_bundle(job.bundle.sha256, job.signature, engine)
        check_manifest_ref(job.bundle, limits)
        yield DeviceModel(job, decode_manifest(client.blobs.get(job.bundle)), client.blobs, place)


def adapt(
    model: DeviceModel,
    data: LocalSource,
    wanted: Adaptation = Adaptation(),
    *,
    engine: str = "onnx",
    threads: int = 1,
) -> tuple[PersonalizationReport, Arrays]:
    """Adapt a model to local samples by a few steps, and evaluate it on other samples before and after.

    Args:
        model: result of :func:`of_files` or :func:`announced`.
        data: the samples of this device (:func:`edgefl_device.data.sources.load`).
        wanted: settings: protocol, steps, step size, samples to evaluate on, seed.
        engine: runtime of the graphs, ``onnx`` or ``executorch``.
        threads: threads of the engine.

    Returns:
        (report, weights): the report with the metrics before and after, and all weights of the adapted model, float
        arrays by global name.

    Raises:
        ConfigError: if the engine is not installed.
        BundleError: if the bundle has no graph that personalizes.
        DataError: if the data do not fit the model.
    """
    check_seed(wanted.seed)
    made = Personalizer(
        engine=open_engine(engine, threads), manifest=model.manifest, blobs=model.blobs, folder=model.folder
    )
    with reporting("adapting the model to the data"):
        report, adapted = made.run(model.job, data, wanted)
    return report, {**made.frozen(model.job), **adapted}
