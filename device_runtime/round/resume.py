"""Taking up, at the beginning of a round, what an earlier one left: found, checked against the graphs, or dropped aloud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from device_runtime.round.graphs import check_port
from device_runtime.round.job import Job
from device_runtime.store.carries import Gone, Mine, Standing, abandoned, foreign, standing
from device_runtime.store.carry import UNKNOWN, Kept
from device_runtime.store.database import Store
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Manifest, Port
from edgefl.wire.errors import BundleError, ProtocolError, RoundDeclined
from edgefl.wire.mqtt.messages import NO_CARRY, Round
from edgefl.wire.tensors import Arrays

Tell = Callable[[str, Kept], None]
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

    Raises RoundDeclined if nothing is there and the program cannot begin without it.
    """
    ports = carry_ports(manifest)
    choice = _choice(store, job, manifest, reads=bool(ports))
    found = choice.found
    taken, why = _read(store, found, ports) if found else (TakenUp(), "")
    if taken is None:  # refused by the server a moment ago
        return take_up(store, job, manifest, tell)
    misfit = (Gone(found, why),) if found and why else ()
    declines = manifest.carry_needed and bool(ports) and not taken.arrays
    what_now = _what_now(job, taken, reads=bool(ports), declines=declines)
    _drop(store, choice, misfit, tell, what_now)
    if declines:
        lost = f": {[*choice.gone, *misfit][-1].why}" if choice.gone or misfit else ""
        raise RoundDeclined(
            NO_CARRY,
            f"program {manifest.program!r} goes on from what a device kept of an earlier round, and this one has "
            f"nothing that round {job.round} can go on from{lost}",
            round=job.round,
        )
    return taken


def drop_abandoned(store: Store, announced: Round, tell: Tell) -> None:
    """Drop what the device kept of rounds between the last completed one and the one that is announced.

    To be asked at every announcement: who sits the next rounds out could not tell later which ones were abandoned.
    """
    own = [row for row in store.carries() if row.name.startswith(f"{announced.run}/")]
    void = abandoned(own, announced.base, announced.round) if announced.state == "open" else []
    gone = tuple(Gone(row, f"round {row.round} was abandoned") for row in void)
    _drop(store, Standing(None, gone, ()), (), tell, "later rounds go on from what was kept before it")


def carry_ports(manifest: Manifest) -> tuple[Port, ...]:
    """What the graphs of a round read of an earlier one."""
    names = dict.fromkeys((manifest.start, *(phase.graph for phase in manifest.phases), manifest.finish))
    return tuple(port for name in names for port in manifest.graph(name).inputs_of("carry"))


def _choice(store: Store, job: Job, manifest: Manifest, *, reads: bool) -> Standing:
    kept, mine = store.carries(), Mine(job.run, carry_name(job, manifest), job.round, job.base)
    judged = standing(kept, mine, manifest.carry_exchanges)
    if reads:
        return judged
    others = foreign(kept, job.run)  # this round asks for nothing; a later one may ask for what is ours
    return Standing(None, tuple(gone for gone in judged.gone if gone.kept in others), ())


def _read(store: Store, found: Kept, ports: Sequence[Port]) -> tuple[TakenUp | None, str]:
    """The tensors of a carry, or why they do not fit; None if it is not there any more."""
    data = store.carry(found)
    if data is None:
        return None, ""
    try:
        arrays = tensors.load(data)
        missing = [port.label for port in ports if port.label not in arrays]
        if missing:
            return TakenUp(), f"the program now reads {missing}, which it does not hold"
        for port in ports:
            check_port(port, arrays[port.label])
    except (ProtocolError, BundleError) as error:
        return TakenUp(), error.message
    return TakenUp(arrays, f"{_of(found)} (task {found.nonce})"), ""


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


def _drop(store: Store, choice: Standing, misfit: Sequence[Gone], tell: Tell, what_now: str) -> None:
    """Tell of what goes, then let it go: who is killed in between tells it twice."""
    gone = (*choice.gone, *misfit)
    for each in {(gone.kept.name, gone.why): gone for gone in gone}.values():
        tell(f"what this device kept {_of(each.kept)} is dropped: {each.why}; {what_now}", each.kept)
    going = [*(each.kept for each in gone), *choice.superseded]
    if misfit:  # those before it fit no better
        going = [row for row in store.carries() if row in going or row.name == misfit[0].kept.name]
    if going:
        store.drop_carries(going)


def _of(kept: Kept) -> str:
    run = kept.name.partition("/")[0]
    return f"of run {run}" if kept.round == UNKNOWN else f"of round {kept.round} of run {run}"
