"""Carries out what the coordinator decides: weights, sums, checkpoints, announcements and tasks of a run's rounds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from edgefl.contract import server_state as memory
from edgefl.contract.server import MEAN
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle import manifest as manifests
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.signatures import Signer
from edgefl.wire.errors import ConfigError, StepError, StoreError
from edgefl.wire.mqtt.messages import Offer, Round, Task, encode
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.regions import Entries, Placement, Region, extract
from edgefl.wire.tensors import Arrays
from server.aggregate.accumulator import Accumulator
from server.aggregate.aggregator import Aggregator, Clip, layout_of
from server.coordinator import machine as coordinator
from server.coordinator.machine import Assignment, OpenRound, State
from server.publish.downlink import Downlink, Part, check_counting
from server.publish.publisher import Publisher, of_units, unit_blobs, version_of
from server.run_spec import ExchangePlan, Plan, Reading, TierPlan
from server.storage.checkpoints import Checkpoints
from server.storage.journal import Journal, Run
from server.storage.published import Shelf

_Published = list[BlobRef]


@dataclass(frozen=True)
class Ended:
    """How a round ended: the model after it, and why that is the old one, if the server's step failed."""

    model_version: str
    outcome: coordinator.Outcome
    failed: str = ""


class Rounds:
    """The current model of a run, and the round under way. Takes up the run it finds in the journal.

    ConfigError if the journal's run has another configuration.
    """

    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        checkpoints: Checkpoints,
        session: Session,
        *,
        device: str = "auto",
        signer: Signer | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._checkpoints = checkpoints
        self._session = session
        self._device = device
        self._clock = clock
        self._topics = Topics(plan.federation)
        self._egress_before = 0
        limits, downlink = plan.limits, plan.downlink
        self.publisher = Publisher(
            session, self._topics, limits.chunk_bytes, downlink.compression, limits.max_blob_bytes
        )
        self.aggregator: Aggregator | None = None
        self._sums: Accumulator | None = None
        self.reading: Mapping[str, Reading] = {}
        forms = {name: tier.form for name, tier in plan.tiers.items()}
        own = [name for name, tier in plan.tiers.items() if tier.published not in plan.units]
        check_counting(plan.count, downlink.encoding, forms, own)
        known = journal.latest_run()
        self.resumed = known is not None
        self._start = known or Run(uuid.uuid4().hex[:16], plan.digest, 1)
        self._check_configuration(self._start)
        self._downlink = Downlink(
            downlink,
            self.publisher,
            Shelf(checkpoints.model.parent, self._start.run),
            limits.max_blob_bytes,
        )
        self.rules = replace(plan.rules, run=self._start.run)
        self._exchanges = plan.exchanges
        sign = signer.sign if signer else (lambda _digest: b"")
        self._offers = [self._offered(exchange, sign) for exchange in self._exchanges]
        self._fixed = frozenset(self.publisher.live)
        self.weights: Arrays = {}
        self.placements: Mapping[str, Placement] = {}
        self.model_version = ""
        if self.resumed:
            self._use_checkpoint(self._start.number - 1, self._downlink.resume)
        else:
            self._begin()

    # -- beginning and resuming ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Journal the run once it has all it needs: what cannot be published must not be taken up by the next start."""
        self._checkpoints.save(0, self._plan.initial)
        self._use_checkpoint(0, self._downlink.publish)
        self._journal.begin_run(self._start)

    def _check_configuration(self, run: Run) -> None:
        if run.digest != self._plan.digest:
            raise ConfigError(
                f"the journal holds run {run.run} of federation {self._plan.federation!r} under another "
                "configuration; restore that configuration or choose another output folder",
                run=run.run,
            )

    def initial_state(self) -> State:
        """The coordinator's state as the journal has it. An open round's time starts anew: nobody could report."""
        state = coordinator.initial(self.model_version, self._clock())
        standing = self._journal.standing(self._start.run)
        state = replace(
            state,
            next_round=self._start.number,
            devices=self._journal.devices(),
            position=standing.position,
            base=standing.base,
            members=standing.members,
        )
        opened = self._journal.current_round(self._start.run)
        if opened is not None:
            if opened.model_version != self.model_version:
                raise StoreError(
                    f"round {opened.number} began from model {opened.model_version[:12]}, its checkpoint holds "
                    f"{self.model_version[:12]}: restore the file, or start over in another folder"
                )
            self._take(opened)
            later = replace(opened, deadline=self._clock() + self.rules.deadline_s)
            state = replace(state, phase="open", round=later)
        for units in self._journal.published_units(self._start.run):
            for ref in msgspec.msgpack.decode(units, type=_Published):
                self.publisher.clear(ref)  # what a killed process published and did not live to clear
        return state

    def _offered(self, exchange: ExchangePlan, sign: Callable[[str], bytes]) -> dict[str, Offer]:
        """The bundles of an exchange, by format and tier."""
        refs: dict[str, dict[str, BlobRef]] = {}
        for tier, plan in exchange.tiers.items():
            for format, bundle in plan.bundles.items():
                refs.setdefault(format, {})[tier] = self._offer_bundle(bundle)
        return {format: _signed(bundles, sign) for format, bundles in refs.items()}

    def _offer_bundle(self, bundle: Bundle) -> BlobRef:
        """The manifest names what travels: compressed graphs, where that pays. It itself travels as it is, so that the
        reference's digest, which is signed, is the manifest's."""
        graphs = tuple(
            msgspec.structs.replace(
                graph, blob=self.publisher.offer(bundle.blobs[graph.blob.sha256], graph.blob.chunk)
            )
            for graph in bundle.manifest.graphs
        )
        manifest = msgspec.structs.replace(bundle.manifest, graphs=graphs)
        return self.publisher.offer(manifests.encode(manifest), plain=True)

    def _use_checkpoint(self, number: int, publish: Callable[[int, str, Mapping[str, Part]], None]) -> None:
        """Make the checkpoint of round ``number`` the current weights, and ``publish`` what the tiers get of them."""
        self.weights = self._checkpoints.load(number)
        self.model_version = version_of(unit_blobs(self.weights, self._plan.units))
        tiers = self._plan.tiers
        self.placements = {tier: plan.place(self.weights, number + 1) for tier, plan in tiers.items()}
        publish(number, self.model_version, self._parts())

    def _parts(self) -> dict[str, Part]:
        """Everything that a tier reads, by the name under which it is published."""
        units = of_units(self.weights, self._plan.units)
        parts: dict[str, Part] = {}
        for exchange in self._exchanges:
            for tier, placement in self.placements.items():
                parts |= self._parts_of(exchange.tiers[tier], placement, units)
        return parts

    def _parts_of(self, tier: TierPlan, placement: Placement, units: Mapping[str, Arrays]) -> dict[str, Part]:
        manifest, trained = tier.bundle.manifest, self._plan.trained
        if not placement.payload:
            fetched = (*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units))
            return {unit: Part(units[unit], trained) for unit in fetched if unit in units}
        parts = {tier.published: Part.of_payload(placement, trained)}
        for kept in tier.reads:
            regions = memory.regions_of(placement, [kept], trained)
            held = extract(self.weights, regions)
            parts[f"{tier.published}/{kept}"] = Part(held, frozenset(), regions=regions)
        return parts

    @property
    def _published(self) -> _Published:
        """Every blob of the current weights."""
        return [ref for refs in self._downlink.units.values() for ref in refs]

    def _take(self, opened: OpenRound) -> None:
        """Be ready for the updates of a round."""
        exchange, trained = self._plan.exchange(opened.position), self._plan.trained
        self.reading = {
            tier: exchange.reading(tier, placement, trained) for tier, placement in self.placements.items()
        }
        self.aggregator = self._new_aggregator(opened)

    def _new_aggregator(self, opened: OpenRound) -> Aggregator:
        plan = self._plan.aggregate
        held = {name for tier in self.reading.values() for name in _globals({**tier.sent, **tier.given})}
        weights = {name: array for name, array in self.weights.items() if name in held}
        nonzero = self._plan.count == "nonzero"
        given = self._downlink.given(self.weights, self._parts()) if nonzero or plan.clip_norm else {}
        # Moving statistics are not trained: they say nothing about how far an update goes.
        untrained = frozenset(weights) - self._plan.trained
        layout = layout_of(weights)
        return Aggregator(
            layout,
            weight_limit=opened.weight_limit,
            device=self._device,
            threads=plan.threads,
            base=given if nonzero else None,
            rule=plan.rule,
            sums=self._sums if self._sums is not None and self._sums.size == layout.size else None,
            clip=Clip(plan.clip_norm, given, untrained) if plan.clip_norm else None,
        )

    # -- rounds ----------------------------------------------------------------------------------------------

    def open(self, state: State) -> None:
        """Journal the state's round, announce it, send every task."""
        opened = state.round
        assert opened is not None
        self._journal.open_round(self.rules.run, opened, msgspec.msgpack.encode(self._published))
        self._take(opened)
        self._egress_before = self._session.sent_bytes
        self.announce(state)
        for assignment in opened.assignments.values():
            self.send_task(opened, assignment)

    def send_task(self, opened: OpenRound, assignment: Assignment) -> None:
        task = Task(
            run=self.rules.run,
            round=opened.number,
            tier=assignment.tier,
            seed=assignment.seed,
            nonce=assignment.nonce,
            samples=self.rules.samples,
        )
        self._session.publish(self._topics.device(assignment.device).tasks, encode(task))

    def end(
        self, ended: OpenRound, outcome: coordinator.Outcome, text: str = "", *, keep: Collection[int] = ()
    ) -> Ended:
        """Save the round's model (of its updates, or the old one) and journal its end. A round whose server step fails is
        abandoned.

        Old checkpoints go, except those of the rounds in ``keep``.
        """
        failed = ""
        if outcome == "closed" and self.aggregator is not None:
            try:
                self.weights = self._concluded(ended, self.aggregator)
            except StepError as error:
                failed = f"round {ended.number} is abandoned and the model unchanged: {error.message}"
                outcome, text = "abandoned", failed
        digest = self._checkpoints.save(ended.number, self.weights)
        self._use_checkpoint(ended.number, self._downlink.publish)
        told: dict[str, Any] = {
            **vars(self._journal.tally(self.rules.run, ended.number)),
            "seconds": self._clock() - ended.opened,
            "weights_sha256": digest,
            "server_down_bytes": self._session.sent_bytes - self._egress_before,
            "text": text,
        }
        self._journal.end_round(self.rules.run, ended.number, state=outcome, outcome=told)
        self._checkpoints.prune(ended.number, keep)
        self._sums = self.aggregator.released() if self.aggregator is not None else None
        self.aggregator = None
        return Ended(self.model_version, outcome, failed)

    def _concluded(self, ended: OpenRound, aggregator: Aggregator) -> Arrays:
        """The model and memory after the round's updates. StepError if the server's step gives none."""
        exchange = self._plan.exchange(ended.position)
        reports = len(ended.with_status("accepted"))
        share = {"share": reports / max(reports, self._devices())}
        hyper = {**self._plan.hyper_at(ended.number, ended.position), **share}
        weights = self.weights
        # Whoever measures how far updates went has to begin where the devices began (server.publish.downlink).
        began = weights if self._exact(exchange) else self._downlink.given(weights, self._parts())
        mean = {**began, **aggregator.result(began)}
        after = memory.stepped(exchange.server, began, mean, hyper)
        if began is weights:
            return after
        # What nobody moved keeps the digits that its way to the devices had rounded off.
        return {name: np.where(array == began[name], weights[name], array) for name, array in after.items()}

    def _exact(self, exchange: ExchangePlan) -> bool:
        """Whether the mean may be taken as it is: devices began with these very weights, or send changes of them, or
        nobody looks at where they began."""
        forms = [tier.form for tier in exchange.tiers.values()]
        rounded = self._plan.downlink.encoding != "float32"
        return not rounded or exchange.server is MEAN or any(form.change for form in forms)

    def _devices(self) -> int:
        """How many devices the method is about: its members, or all that were ever seen and have a tier."""
        if self.rules.all_needed:
            return len(self._journal.standing(self.rules.run).members)
        return sum(1 for device in self._journal.devices().values() if device.tier)

    def announce(self, state: State) -> None:
        """Say where the run is, then clear the blobs that this no longer names. Its blobs have been offered before."""
        current, told = state.round, _told(state)
        number = current.number if current else max(0, state.next_round - 1)
        # Between rounds the main exchange is offered: the one that adapts the model to a user, if any does.
        position = current.position if current else self._plan.next_main(state.position)
        message = Round(
            run=self.rules.run,
            round=number,
            state=told,
            model_version=self.model_version,
            offers=self._offers[self._plan.index(position)],
            units=self._downlink.units,
            hyper=self._plan.hyper_at(max(1, number), position),
            base=state.base,
            deadline=current.deadline if current else 0.0,
        )
        self.publisher.announce(message)
        self.publisher.keep_only(self._fixed | {ref.sha256 for ref in self._published})


def _signed(bundles: dict[str, BlobRef], sign: Callable[[str], bytes]) -> Offer:
    signatures = {tier: sign(ref.sha256) for tier, ref in bundles.items()}
    return Offer(bundles=bundles, signatures={tier: each for tier, each in signatures.items() if each})


def _told(state: State) -> Literal["open", "closed", "done"]:
    if state.round is not None:
        return "open"
    return "done" if state.phase == "done" else "closed"


def _globals(regions: Mapping[str, Region]) -> set[str]:
    """The global tensors that local ones lie in."""
    return {
        part
        for name, region in regions.items()
        for part in (region.names if isinstance(region, Entries) else (name,))
    }
