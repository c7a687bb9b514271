"""Carry (state of earlier rounds): chosen when a round begins, checked against the graphs, dropped when it is invalid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgefl.errors import BundleError, ProtocolError, RoundDeclined
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Manifest, Port
from edgefl.wire.mqtt.messages import NO_CARRY, Round
from edgefl.wire.tensors import Arrays
from edgefl_device.config import DeviceLog
from edgefl_device.round.graph_loader import check_port
from edgefl_device.round.job import Job
from edgefl_device.store.database import Store, StoredCarry


@dataclass(frozen=True)
class RoundToBegin:
    """Round that begins and may continue from a carry (state that an algorithm stores on the device from round to
    round).

    Attributes:
        run: Name of the run.
        name: Name of its carries in the store: ``<run>/<algorithm>/<tier>``.
        round: Number of the round.
        base: Last completed round.
    """

    run: str
    name: str
    round: int
    base: int


@dataclass(frozen=True)
class VoidCarry:
    """Carry (stored state of an earlier round) that is no longer valid, and the reason."""

    carry: StoredCarry
    why: str


@dataclass(frozen=True)
class CarryChoice:
    """Decision, when a round begins, about the carries: state of earlier rounds, such as the residual of a codec.

    Attributes:
        carry: The carry that the round continues from; None if no carry is valid.
        void: Invalid carries with reasons. They are reported, then deleted.
        superseded: Valid carries that are older. They are deleted without a report.
    """

    carry: StoredCarry | None
    void: tuple[VoidCarry, ...]
    superseded: tuple[StoredCarry, ...]


def choose(carries: Sequence[StoredCarry], begun: RoundToBegin, exchanges: int) -> CarryChoice:
    """Choose the carry (state of an earlier round) that a round continues from: the newest one of a completed round.

    Older carries are superseded unless a rejection of the newest one's update could make them the newest again.

    Args:
        carries: Stored carries, oldest first.
        begun: The round that begins.
        exchanges: Number of completed rounds for which a carry is valid; 0: without limit.
    """
    void = [
        VoidCarry(carry, f"it belongs to another run, {begun.run} goes on now")
        for carry in foreign(carries, begun.run)
    ]
    own = [carry for carry in carries if carry.name == begun.name]
    lost = abandoned(own, begun.base, None)
    void += [VoidCarry(carry, f"round {carry.round} was abandoned") for carry in lost]
    valid = [carry for carry in own if carry not in lost]
    if valid and (why := _too_old(valid[-1], begun.base, exchanges)):
        return CarryChoice(None, (*void, VoidCarry(valid[-1], why)), tuple(valid[:-1]))
    settled = [place for place, carry in enumerate(valid) if not carry.waits]
    superseded = tuple(valid[: settled[-1]]) if settled else ()
    return CarryChoice(valid[-1] if valid else None, tuple(void), superseded)


def of_other_tiers(carries: Sequence[StoredCarry], begun: RoundToBegin, exchanges: int) -> list[StoredCarry]:
    """Return the valid carries (stored state of earlier rounds) of the same run and algorithm in other tiers, oldest
    first.

    Args:
        carries: Stored carries, oldest first.
        begun: The round that begins.
        exchanges: Number of completed rounds for which a carry is valid; 0: without limit.
    """
    algorithm = begun.name.rpartition("/")[0]
    return [
        carry
        for carry in carries
        if carry.name != begun.name
        and carry.name.rpartition("/")[0] == algorithm
        and carry.round <= begun.base
        and not _too_old(carry, begun.base, exchanges)
    ]


def foreign(carries: Sequence[StoredCarry], run: str) -> list[StoredCarry]:
    """Return the carries (stored state of earlier rounds) of runs other than ``run``; no round of ``run`` reads them."""
    return [carry for carry in carries if not carry.name.startswith(f"{run}/")]


def abandoned(carries: Sequence[StoredCarry], base: int, before: int | None) -> list[StoredCarry]:
    """Return the carries (stored state) of rounds that were abandoned: those later than ``base``, the last completed
    round.

    If ``before`` is not None, only carries of rounds before round ``before`` are returned.
    """
    return [carry for carry in carries if carry.round > base and (before is None or carry.round < before)]


def _too_old(carry: StoredCarry, base: int, exchanges: int) -> str:
    """Return the reason why a carry (stored state of an earlier round) has expired, or "" if it is valid.

    ``base`` is the last completed round, ``exchanges`` the number of completed rounds for which a carry is valid; 0:
    without limit.
    """
    if not exchanges or base - carry.round < exchanges:
        return ""
    return f"it was good for {exchanges} completed round{'s' * (exchanges > 1)} after it, and round {base} is completed"


@dataclass(frozen=True)
class RestoredCarry:
    """Arrays that an earlier round left on this device, by label; empty if there are none. ``origin`` names that round."""

    arrays: Arrays = field(default_factory=dict)
    origin: str = ""


def carry_name(job: Job, manifest: Manifest) -> str:
    """Return the name in the store of a job's carry (state for later rounds): ``<run>/<algorithm>/<tier>``."""
    return f"{job.run}/{manifest.program}/{job.tier}"


def carry_ports(manifest: Manifest) -> tuple[Port, ...]:
    """Return the inputs with role ``carry`` (state from an earlier round) of all graphs of a training round.

    The result is empty if the algorithm stores no state on the device.
    """
    names = dict.fromkeys((manifest.start, *(phase.graph for phase in manifest.phases), manifest.finish))
    return tuple(port for name in names for port in manifest.graph(name).inputs_of("carry"))


def restore_carry(store: Store, job: Job, manifest: Manifest, log: DeviceLog) -> RestoredCarry:
    """Return the carry (state that an earlier round left on this device) for the round of ``job``; empty if its graphs
    read none or none is stored.

    Carries that are out of date, or do not fit the graphs, are reported to ``log`` and deleted from ``store``.

    Raises:
        RoundDeclined: No valid carry is stored, and the algorithm cannot begin without one.
    """
    ports = carry_ports(manifest)
    carries = store.carries()
    begun = RoundToBegin(job.run, carry_name(job, manifest), job.round, job.base)
    choice = choose(carries, begun, manifest.carry_exchanges)
    if not ports:
        # This round reads no carry; a later one may read those of this run.
        others = foreign(carries, job.run)
        choice = CarryChoice(None, tuple(void for void in choice.void if void.carry in others), ())
    restored = RestoredCarry()
    misfit: tuple[VoidCarry, ...] = ()
    if choice.carry is not None:
        data = store.carry(choice.carry)
        if data is None:  # the server refused its update a moment ago
            return restore_carry(store, job, manifest, log)
        restored, problem = _read(choice.carry, data, ports)
        if problem:
            misfit = (VoidCarry(choice.carry, problem),)
    if ports and manifest.carry_any_tier is True:
        newest = choice.carry.id if restored.arrays and choice.carry is not None else 0
        for carry in reversed(of_other_tiers(carries, begun, manifest.carry_exchanges)):
            data = store.carry(carry) if carry.id > newest else None
            other = RestoredCarry() if data is None else _read(carry, data, ports)[0]
            if other.arrays:
                restored = other
                break
    declines = manifest.carry_needed and bool(ports) and not restored.arrays
    if declines:
        outcome = f"this device declines round {job.round}"
    elif not ports:
        outcome = f"round {job.round} asks for nothing of earlier ones"
    elif restored.arrays:
        outcome = f"round {job.round} continues from what was kept {restored.origin}"
    else:
        outcome = f"round {job.round} begins from zeros"
    _drop(store, choice, misfit, log, outcome)
    if declines:
        lost = f": {[*choice.void, *misfit][-1].why}" if choice.void or misfit else ""
        raise RoundDeclined(
            NO_CARRY,
            f"algorithm {manifest.program!r} continues from an earlier round, and this device has "
            f"nothing that round {job.round} can continue from{lost}",
            round=job.round,
        )
    return restored


def drop_abandoned(store: Store, announced: Round, log: DeviceLog) -> None:
    """Report and drop the carries (stored state) of rounds between the last completed one and the announced one.

    Call it at every announcement: a device that misses the next rounds cannot learn later which ones were abandoned.
    """
    own = [carry for carry in store.carries() if carry.name.startswith(f"{announced.run}/")]
    lost = abandoned(own, announced.base, announced.round) if announced.state == "open" else []
    void = tuple(VoidCarry(carry, f"round {carry.round} was abandoned") for carry in lost)
    _drop(store, CarryChoice(None, void, ()), (), log, "later rounds continue from what was kept before it")


def _read(carry: StoredCarry, data: bytes, ports: Sequence[Port]) -> tuple[RestoredCarry, str]:
    """Decode the stored bytes of a carry (state of an earlier round), and check them against the ports that read them.

    Returns:
        (arrays, ""), or (no arrays, reason) if they do not fit the ports.
    """
    try:
        arrays = tensors.load(data)
        missing = [port.label for port in ports if port.label not in arrays]
        if missing:
            return RestoredCarry(), f"the algorithm now reads {missing}, which it does not hold"
        for port in ports:
            check_port(port, arrays[port.label])
    except (ProtocolError, BundleError) as error:
        return RestoredCarry(), error.message
    return RestoredCarry(arrays, f"{_origin(carry)} (task {carry.nonce})"), ""


def _drop(
    store: Store, choice: CarryChoice, misfit: Sequence[VoidCarry], log: DeviceLog, outcome: str
) -> None:
    """Report invalid carries to ``log``, then delete them and the superseded ones. A process that is killed in between
    reports them again.

    Args:
        store: Storage of the carries.
        choice: Invalid and superseded carries.
        misfit: Further invalid carries, which do not fit the graphs.
        log: Receives one event for each invalid carry.
        outcome: Consequence for the training; the last part of each report.
    """
    void = (*choice.void, *misfit)
    for each in {(one.carry.name, one.why): one for one in void}.values():
        text = f"what this device kept {_origin(each.carry)} is dropped: {each.why}; {outcome}"
        log.event("carry", text, run=each.carry.name.partition("/")[0], round=each.carry.round)
    useless = [*(each.carry for each in void), *choice.superseded]
    if misfit:  # those before it fit no better
        useless = [c for c in store.carries() if c in useless or c.name == misfit[0].carry.name]
    if useless:
        store.drop_carries(useless)


def _origin(carry: StoredCarry) -> str:
    return f"of round {carry.round} of run {carry.name.partition('/')[0]}"
