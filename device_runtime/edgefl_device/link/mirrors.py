"""Blobs by mirrors: what a round's announcement names, and what the device was given, before the broker is asked.

A mirror is believed nothing. Each chunk is held against its digest as it comes, and what is right stays, so that whatever a
mirror does costs a bounded time: the next one, or the broker, goes on where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from edgefl.errors import BundleError, ConfigError, MirrorError, RoundAborted, RoundDeclined
from edgefl.wire.blobs import BlobRef
from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import MOST_MIRRORS, Mirror
from edgefl.wire.mqtt.messages import LOST_CHUNK, POLICY, Round
from edgefl_device.store.database import Store

_MOST_DOUBLINGS = 6
_MOST_FAILED = 2
_MOST_LACKS = 3
"""Blobs in a row that a mirror has not, until it is left like one that fails."""

Tell = Callable[[str], None]


@dataclass
class _Record:
    """How a mirror did lately: ``faults`` in a row, and until when it is left; what was told of it."""

    faults: int = 0
    left_until: float = 0.0
    told: str = ""


@dataclass
class _Pace:
    """Bytes since ``began``; MirrorError once they are too few."""

    least_s: int
    patience_s: float
    nbytes: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        took = time.monotonic() - self.began
        if took < self.patience_s:
            return
        if self.nbytes < self.least_s * took:
            raise MirrorError(
                f"it gave {self.nbytes / took:.0f} bytes/s over {took:.0f} s (limits.mirror_bytes_s)"
            )
        self.nbytes, self.began = 0, time.monotonic()


class Mirrors:
    """Those of one device. ``own`` were given to it, and are asked first; those that the server names only if ``allowed``.

    ``ca_file``: an authority beside the system's. ``tell`` is told what is wrong with a mirror, once for as long as it stays
    so. :meth:`announced` and the others may be called by different threads.
    """

    def __init__(
        self,
        limits: Limits,
        own: Sequence[Mirror] = (),
        *,
        allowed: bool = True,
        ca_file: str = "",
        tell: Tell = lambda _: None,
    ) -> None:
        self._limits = limits
        self._own = tuple(own)
        self._allowed = allowed
        self._ca_file = ca_file
        self._tell = tell
        self._named: tuple[Mirror, ...] = ()
        self._records: dict[Mirror, _Record] = {}
        self._only = False
        self._counted = False
        self._unreadable = ""
        self.received_bytes = 0
        """Of chunks that came by mirrors, wrong ones too, since the start."""
        self._taken = 0

    def announced(self, announced: Round) -> None:
        """Where the blobs of the current round are."""
        named, wrong = [], ""
        for text in announced.mirrors[:MOST_MIRRORS]:
            try:
                named.append(Mirror.parse(text))
            except ConfigError as error:
                wrong = error.message
        if wrong != self._unreadable:
            self._unreadable = wrong
            if wrong:
                self._tell(f"the server names a mirror that is none: {wrong}")
        self._named = tuple(dict.fromkeys(named)) if self._allowed else ()
        self._only, self._counted = announced.mirrors_only, bool(announced.mirrors)
        known = {*self._own, *self._named}
        self._records = {mirror: record for mirror, record in self._records.items() if mirror in known}

    @property
    def fresh_bytes(self) -> int:
        """Of chunks that came since they were last taken."""
        return self.received_bytes - self._taken

    def take_received(self) -> int:
        """Bytes since this was last asked, for a server that names mirrors: one that does not may know of no such thing."""
        fresh, self._taken = self.fresh_bytes, self.received_bytes
        return fresh if self._counted else 0

    def bring(self, refs: Sequence[BlobRef], store: Store, aborted: Callable[[], bool]) -> None:
        """Have as many chunks of ``refs`` in the store as mirrors give. RoundAborted where there is no more use of them.

        Where there is a broker, two that fail are enough for one time.
        """
        failed = 0
        for mirror in self._usable():
            wanted = list({ref.sha256: ref for ref, _ in store.missing(refs)}.values())
            if not wanted or (failed == _MOST_FAILED and not self._only):
                return
            failed += not self._ask(mirror, wanted, store, aborted)

    def check_broker(self) -> None:
        """To be called where something is missing still. BundleError if it lies at mirrors only."""
        if not self._only:
            return
        if not (self._named or self._own):
            raise RoundDeclined(
                POLICY,
                "the weights of this federation come by mirrors only, and this device may use none: allow mirrors in its "
                "policy, or name one of its own by `mirror`",
            )
        asked = (*self._own, *self._named)
        faults = "; ".join(
            f"{mirror}: {self._records[mirror].told or 'left for a while'}"
            for mirror in asked
            if mirror in self._records
        )
        raise BundleError(
            f"{LOST_CHUNK}: no mirror gave all blobs of the round, and the broker has none: {faults}"
        )

    def _usable(self) -> Iterator[Mirror]:
        for mirror in dict.fromkeys((*self._own, *self._named)):
            if self._records.get(mirror, _Record()).left_until <= time.monotonic():
                yield mirror

    def _ask(
        self, mirror: Mirror, refs: Sequence[BlobRef], store: Store, aborted: Callable[[], bool]
    ) -> bool:
        """Whether the mirror did not fail."""
        # What speaks HTTP takes 2.4 MB of a device, and most have no mirror.
        from edgefl.wire.mirror_client import BlobMissing, MirrorConnection, Watchdog

        record, lacks = self._records.setdefault(mirror, _Record()), 0
        near, patience_s = mirror not in self._own, self._limits.fetch_timeout_s
        pace = _Pace(0 if self._only else self._limits.mirror_bytes_s, patience_s)
        with (
            Watchdog(aborted) as alarm,
            MirrorConnection(mirror, alarm, patience_s=patience_s, near=near, ca_file=self._ca_file) as line,
        ):
            for ref in refs:
                try:
                    for first, last in _runs(store.missing_chunks(ref)):
                        pieces = line.pieces(
                            ref.sha256,
                            ref.size,
                            first=first * ref.chunk,
                            last=min(last * ref.chunk, ref.size),
                            step=ref.chunk,
                        )
                        self._keep(ref, first, pieces, store, pace)
                    record.faults, record.told, lacks = 0, "", 0
                except MirrorError as error:
                    if aborted():
                        raise RoundAborted("the round ended while its blobs were fetched") from error
                    lacks += 1
                    if isinstance(error, BlobMissing) and lacks < _MOST_LACKS:
                        continue
                    self._leave(mirror, record, f"blob {ref.sha256[:12]}: {error.message}")
                    return False
        return True

    def _keep(self, ref: BlobRef, first: int, pieces: Iterator[bytes], store: Store, pace: _Pace) -> None:
        for index, piece in enumerate(pieces, first):
            self.received_bytes += len(piece)
            if not ref.accepts(index, piece):
                raise MirrorError(f"chunk {index} has a wrong digest")
            store.put_chunk(ref, index, piece)
            pace.add(len(piece))

    def _leave(self, mirror: Mirror, record: _Record, why: str) -> None:
        # Where there is no broker to turn to, it is tried again soon.
        doubled = 0 if self._only else min(record.faults, _MOST_DOUBLINGS)
        pause = self._limits.mirror_pause_s * 2.0**doubled
        record.faults += 1
        record.left_until = time.monotonic() + pause
        if why != record.told:
            record.told = why
            self._tell(f"mirror {mirror} is left for {pause:g} s: {why}")


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The stretches of neighbours in ascending ``indices``: the first of each, and the one after its last."""
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        yield run[0], run[-1] + 1
