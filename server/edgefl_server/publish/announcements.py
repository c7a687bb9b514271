"""Announcements to the devices of a run: bundles, parts of the model, mirrors, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import encode_manifest
from edgefl.wire.bundle.readers import TextSpec
from edgefl.wire.mqtt.envelope import Seal, unsigned
from edgefl.wire.mqtt.messages import ELSEWHERE, VERSION, LiveRound, Offer, Round, Task
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import NO_SHARD, Topics
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import OpenRound, State
from edgefl_server.hyperparameters import round_hyperparameters
from edgefl_server.publish.blob_store import MirrorFolder
from edgefl_server.publish.downlink import Downlink
from edgefl_server.publish.model import ModelVersion
from edgefl_server.publish.publisher import Publisher
from edgefl_server.run_spec import ExchangeSpec, RunSpec
from edgefl_server.storage.checkpoints import PublishedModels

Sign = Callable[[str], bytes]
"""Function from the digest of a manifest to its signature; an empty signature if bundles are not signed."""


_PROGRESS_S = 0.2
"""Default time between two progress messages of a device."""


class Announcements:
    """Publisher of one run's announcements and tasks. The bundles are published from the start.

    Args:
        spec: Description of the run.
        run: Identifier of the run.
        session: Broker session that sends the messages.
        folder: Folder of the run, which stores the published models.
        sign: Function that signs the digest of a manifest.
        seal: Function that signs a message for a topic.
    """

    def __init__(
        self,
        spec: RunSpec,
        run: str,
        session: Session,
        folder: Path,
        *,
        sign: Sign = lambda _: b"",
        seal: Seal = unsigned,
    ) -> None:
        self._spec = spec
        self._run = run
        self._session = session
        self._seal = seal
        self._topics = Topics(spec.federation)
        limits, downlink = spec.limits, spec.downlink
        mirrored = downlink.mirror_folder or (str(folder / "mirror") if downlink.mirrors else "")
        self.publisher = Publisher(
            session,
            self._topics,
            limits.chunk_bytes,
            downlink.compression,
            limits.max_blob_bytes,
            seal,
            store=MirrorFolder(Path(mirrored)) if mirrored else None,
            by_broker=not downlink.mirrors_only,
            most_bytes=limits.announcement_bytes,
        )
        self.publisher.message_limit = spec.message_limit
        self._downlink = Downlink(
            downlink, self.publisher, PublishedModels(folder, run), limits.max_blob_bytes
        )
        self._offers = [self._offer(exchange, sign) for exchange in spec.offered]
        self._bundles = frozenset(self.publisher.live)
        self._units: dict[int, dict[str, tuple[BlobRef, ...]]] = {}
        """Blobs of the models from which the last rounds began, by round number."""

    @property
    def sent_bytes(self) -> int:
        """Number of bytes of all messages that the session has sent so far."""
        return self._session.sent_bytes

    @property
    def published(self) -> list[BlobRef]:
        """References of all blobs of the current model.

        They include the blob with the rest of an announcement that was too large for one message.
        """
        return [*_refs(self._downlink.units), *self.publisher.pages]

    def publish(self, model: ModelVersion) -> None:
        """Publish all parts of a new model, so that :meth:`announce` can name them.

        Raises:
            StoreError: If the parts cannot be written to disk.
            ConfigError: If a part is larger than the limit of a blob.
        """
        self._downlink.publish(model.number, model.version, model.parts(self._spec))
        self._keep_units(model)

    def _keep_units(self, model: ModelVersion) -> None:
        number, most = model.number + 1, self._spec.rules.max_staleness
        self._units = {each: units for each, units in self._units.items() if number - most <= each < number}
        self._units[number] = self._downlink.units

    def resume(self, model: ModelVersion) -> None:
        """Publish the parts of ``model`` after a restart, with the same bytes as the previous server process.

        If the record of those bytes is missing, the parts are encoded anew.

        Raises:
            StoreError: If the parts cannot be written to disk.
        """
        self._downlink.resume(model.number, model.version, model.parts(self._spec))
        self._keep_units(model)

    def received(self, model: ModelVersion) -> Arrays:
        """Return the weights of ``model``, by global name, as devices receive them: rounded by the downlink's
        encoding.

        With int8 the model must be the last published one.
        """
        return self._downlink.received(model.weights, model.parts(self._spec))

    def clear(self, refs: Iterable[BlobRef]) -> None:
        """Clear retained blobs at the broker that an earlier process published. Live blobs stay."""
        for ref in refs:
            self.publisher.clear(ref)

    def announce(self, state: State, model_version: str) -> None:
        """Publish the announcement of the run's state, then clear the blobs that the new announcement does not name.

        The blobs of the current model must be published before.

        Args:
            state: State of the coordinator.
            model_version: Version of the current model.

        Raises:
            ConfigError: If the announcement is larger than the broker accepts.
        """
        current, spec = state.round, self._spec
        number = current.number if current else max(0, state.next_round - 1)
        # Between rounds the main exchange is offered: the one that adapts the model to a user, if any does.
        position = current.position if current else spec.next_main(state.position)
        downlink = spec.downlink
        message = Round(
            v=ELSEWHERE if downlink.mirrors_only else VERSION,
            run=self._run,
            round=number,
            state=_public_state(state),
            model_version=model_version,
            offers=self._offers[spec.index(position)],
            units=self._downlink.units,
            hyper=round_hyperparameters(spec, max(1, number), position),
            # What a device kept of a task that was accepted is good, whatever became of the round that it was given in.
            base=number if spec.rules.buffered else state.base,
            deadline=current.deadline if current else 0.0,
            mirrors=downlink.mirrors,
            mirrors_only=downlink.mirrors_only,
            live=self._live(current),
        )
        self.publisher.announce(message)
        older = [ref for number in (current.older if current else ()) for ref in _refs(self._units[number])]
        self.publisher.keep_only(self._bundles | {ref.sha256 for ref in (*self.published, *older)})

    def _live(self, current: OpenRound | None) -> dict[int, LiveRound]:
        return {
            number: LiveRound(
                model_version=version.model_version,
                units=self._units[number],
                hyper=round_hyperparameters(self._spec, number, version.position),
            )
            for number, version in (current.older if current is not None else {}).items()
        }

    def send_task(
        self, opened: OpenRound, assignment: Assignment, *, ask: bool, shard: int = NO_SHARD
    ) -> None:
        """Send a device its task.

        Args:
            opened: The open round.
            assignment: Task of the device.
            ask: True if the device must offer its update and wait for a request before it sends it.
            shard: Shard of the topic for its update; NO_SHARD for the server's own topic.
        """
        period_s = opened.count("open") / self._spec.limits.progress_messages_s
        task = Task(
            run=self._run,
            round=assignment.round,
            tier=assignment.tier,
            seed=assignment.seed,
            nonce=assignment.nonce,
            samples=self._spec.rules.samples,
            ask=ask or msgspec.UNSET,
            progress_s=period_s if period_s > _PROGRESS_S else msgspec.UNSET,
            shard=msgspec.UNSET if shard == NO_SHARD else shard,
        )
        topic = self._topics.device(assignment.device).tasks
        self._session.publish(topic, self._seal(topic, task), expires_s=self._spec.rules.deadline_s)

    def call(self, number: int, device: str, tier: str) -> None:
        """Send a device a task message without a nonce, which makes it read the announcement again but assigns no task.

        Args:
            number: Round that has just ended.
            device: Name of the device.
            tier: Tier of the device.
        """
        topic = self._topics.device(device).tasks
        task = Task(run=self._run, round=number, tier=tier, seed=0, nonce="")
        self._session.publish(topic, self._seal(topic, task), expires_s=self._spec.limits.round_deadline_s)

    def _offer(self, exchange: ExchangeSpec, sign: Sign) -> dict[str, Offer]:
        """Publish the bundles of an exchange (round trip of the algorithm).

        Return its offers by format; an offer names the bundle of each tier, with signatures.
        """
        refs: dict[str, dict[str, BlobRef]] = {}
        for tier, spec in exchange.tiers.items():
            for format, bundle in spec.bundles.items():
                refs.setdefault(format, {})[tier] = offer_bundle(self.publisher, bundle)
        return {format: _sign_offer(bundles, sign) for format, bundles in refs.items()}


def _refs(units: Mapping[str, tuple[BlobRef, ...]]) -> list[BlobRef]:
    return [ref for refs in units.values() for ref in refs]


def offer_bundle(publisher: Publisher, bundle: BundleArchive) -> BlobRef:
    """Publish the blobs of a bundle, and return the reference of its manifest.

    The published manifest names the blobs as they were sent, which may be compressed.

    Raises:
        ConfigError: If a blob is larger than the limit.
        StoreError: If a blob cannot be stored.
    """
    graphs = tuple(
        msgspec.structs.replace(
            graph, blob=publisher.offer(bundle.blobs[graph.blob.sha256], graph.blob.chunk)
        )
        for graph in bundle.manifest.graphs
    )
    data = bundle.manifest.data
    if isinstance(data.reader, TextSpec) and (ref := data.reader.tokenizer):
        sent = publisher.offer(bundle.blobs[ref.sha256], ref.chunk)
        data = msgspec.structs.replace(data, reader=msgspec.structs.replace(data.reader, tokenizer=sent))
    for variant in (each for graph in graphs for each in graph.variants):
        publisher.offer(bundle.blobs[variant.blob.sha256], variant.blob.chunk, plain=True)
    manifest = msgspec.structs.replace(bundle.manifest, graphs=graphs, data=data)
    return publisher.offer(encode_manifest(manifest), plain=True)


def _sign_offer(bundles: Mapping[str, BlobRef], sign: Sign) -> Offer:
    signatures = {tier: sign(ref.sha256) for tier, ref in bundles.items()}
    return Offer(bundles=dict(bundles), signatures={tier: each for tier, each in signatures.items() if each})


def _public_state(state: State) -> Literal["open", "closed", "done"]:
    if state.round is not None:
        return "open"
    return "done" if state.phase == "done" else "closed"
