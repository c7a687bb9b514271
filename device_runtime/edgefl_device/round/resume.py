"""Taking up, at the beginning of a round, what an earlier one left: checked against the graphs, and what is of no use
is dropped after its user was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgefl.errors import BundleError, ProtocolError, RoundDeclined
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Manifest, Port
from edgefl.wire.mqtt.messages import NO_CARRY, Round
from edgefl.wire.tensors import Arrays
from edgefl_device.round.graphs import check_port
from edgefl_device.round.job import Job
from edgefl_device.store import carry_choice
from edgefl_device.store.carry_choice import StoredCarry
from edgefl_device.store.database import Store

Tell = Callable[[str, StoredCarry], None]
"""(text for people, the carry that it is about)."""


@dataclass(frozen=True)
class TakenUp:
    """What a round goes on from; nothing of it is zeros. ``origin`` names the round that left it."""

    arrays: Arrays = field(default_factory=dict)
    origin: str = ""


def carry_name(job: Job, manifest: Manifest) -> str:
    return f"{job.run}/{manifest.program}/{job.tier}"


def take_up(store: Store, job: Job, manifest: Manifest, tell: Tell) -> TakenUp:
    """What the round of ``job`` goes on from. What is of no use any more is told, then dropped.

    Raises RoundDeclined if nothing is there and the algorithm cannot begin without it.
    """
    ports = carry_ports(manifest)
    choice = _choice(store, job, manifest, reads=bool(ports))
    carry = choice.carry
    start, why = _read(store, carry, ports) if carry else (TakenUp(), "")
    if start is None:  # refused by the server a moment ago
        return take_up(store, job, manifest, tell)
    misfit = (carry_choice.VoidCarry(carry, why),) if carry and why else ()
    declines = manifest.carry_needed and bool(ports) and not start.arrays
    what_now = _what_now(job, start, reads=bool(ports), declines=declines)
    _drop(store, choice, misfit, tell, what_now)
    if declines:
        lost = f": {[*choice.void, *misfit][-1].why}" if choice.void or misfit else ""
        raise RoundDeclined(
            NO_CARRY,
            f"algorithm {manifest.program!r} goes on from what a device kept of an earlier round, and this one has "
            f"nothing that round {job.round} can go on from{lost}",
            round=job.round,
        )
    return start


def drop_abandoned(store: Store, announced: Round, tell: Tell) -> None:
    """Drop what the device kept of rounds between the last completed one and the one that is announced.

    To be asked at every announcement: who sits the next rounds out could not tell later which ones were abandoned.
    """
    own = [carry for carry in store.carries() if carry.name.startswith(f"{announced.run}/")]
    lost = carry_choice.abandoned(own, announced.base, announced.round) if announced.state == "open" else []
    void = tuple(carry_choice.VoidCarry(carry, f"round {carry.round} was abandoned") for carry in lost)
    _drop(
        store,
        carry_choice.CarryChoice(None, void, ()),
        (),
        tell,
        "later rounds go on from what was kept before it",
    )


def carry_ports(manifest: Manifest) -> tuple[Port, ...]:
    """What the graphs of a round read of an earlier one."""
    names = dict.fromkeys((manifest.start, *(phase.graph for phase in manifest.phases), manifest.finish))
    return tuple(port for name in names for port in manifest.graph(name).inputs_of("carry"))


def _choice(store: Store, job: Job, manifest: Manifest, *, reads: bool) -> carry_choice.CarryChoice:
    carries = store.carries()
    begun = carry_choice.RoundToBegin(job.run, carry_name(job, manifest), job.round, job.base)
    choice = carry_choice.choose(carries, begun, manifest.carry_exchanges)
    if reads:
        return choice
    others = carry_choice.foreign(
        carries, job.run
    )  # this round asks for nothing; a later one may ask for those of this run
    return carry_choice.CarryChoice(None, tuple(void for void in choice.void if void.carry in others), ())


def _read(store: Store, carry: StoredCarry, ports: Sequence[Port]) -> tuple[TakenUp | None, str]:
    """The tensors of a carry, or why they do not fit; None if it is not there any more."""
    data = store.carry(carry)
    if data is None:
        return None, ""
    try:
        arrays = tensors.load(data)
        missing = [port.label for port in ports if port.label not in arrays]
        if missing:
            return TakenUp(), f"the algorithm now reads {missing}, which it does not hold"
        for port in ports:
            check_port(port, arrays[port.label])
    except (ProtocolError, BundleError) as error:
        return TakenUp(), error.message
    return TakenUp(arrays, f"{_of(carry)} (task {carry.nonce})"), ""


def _what_now(job: Job, taken: TakenUp, *, reads: bool, declines: bool) -> str:
    if declines:
        return f"this device declines round {job.round}"
    if not reads:
        return f"round {job.round} asks for nothing of earlier ones"
    return (
        f"round {job.round} goes on from what was kept {taken.origin}"
        if taken.arrays
        else (f"round {job.round} begins from zeros")
    )


def _drop(
    store: Store,
    choice: carry_choice.CarryChoice,
    misfit: Sequence[carry_choice.VoidCarry],
    tell: Tell,
    what_now: str,
) -> None:
    """Tell of what is void, then drop it: a process killed in between tells it twice."""
    void = (*choice.void, *misfit)
    for each in {(one.carry.name, one.why): one for one in void}.values():
        tell(f"what this device kept {_of(each.carry)} is dropped: {each.why}; {what_now}", each.carry)
    useless = [*(each.carry for each in void), *choice.superseded]
    if misfit:  # those before it fit no better
        useless = [c for c in store.carries() if c in useless or c.name == misfit[0].carry.name]
    if useless:
        store.drop_carries(useless)


def _of(carry: StoredCarry) -> str:
    run = carry.name.partition("/")[0]
    return f"of round {carry.round} of run {run}"
