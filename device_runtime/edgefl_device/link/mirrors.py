"""Download from mirrors: first the owner's, then those that the announcement names, before the broker.

Mirrors are not trusted. Each chunk is compared with its digest on arrival, and valid chunks stay. A bad mirror
therefore costs a bounded time: the next mirror or the broker continues where it ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from edgefl.errors import BundleError, ConfigError, MirrorError, RoundAborted, RoundDeclined
from edgefl.wire.blobs import BlobRef
from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import MOST_MIRRORS, Mirror
from edgefl.wire.mqtt.messages import LOST_CHUNK, POLICY, Round
from edgefl_device.config import DeviceLog
from edgefl_device.store.database import Store

_MOST_DOUBLINGS = 6
_MOST_FAILED = 2
_MOST_LACKS = 3
"""Blobs in a row that a mirror lacks, until it is left like one that fails."""


@dataclass
class _MirrorRecord:
    """Recent behaviour of a mirror: successive failures, the time until which it is not used, and the last reported
    problem.
    """

    faults: int = 0
    left_until: float = 0.0
    reported: str = ""


@dataclass
class _MinimumRate:
    """Check of a mirror's speed, which raises MirrorError if a period brings too few bytes.

    Attributes:
        least_s: Smallest accepted rate in bytes per second.
        patience_s: Length of a period in seconds.
        nbytes: Bytes received in this period.
        began: Start of this period, as ``time.monotonic()``.
    """

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
    """Mirrors (HTTP servers with copies of blobs) of one device, from which blobs are downloaded before the broker is
    used.

    Args:
        limits: Sizes and timeouts.
        own: Mirrors of the owner, which are used first.
        allowed: False ignores the mirrors that the server names.
        ca_file: Certificate of an authority besides the system's.
        log: Receives each problem of a mirror once for as long as it lasts; None reports nothing.
    """

    def __init__(
        self,
        limits: Limits,
        own: Sequence[Mirror] = (),
        *,
        allowed: bool = True,
        ca_file: str = "",
        log: DeviceLog | None = None,
    ) -> None:
        self._limits = limits
        self._own = tuple(own)
        self._allowed = allowed
        self._ca_file = ca_file
        self._log = log
        self._named: tuple[Mirror, ...] = ()
        self._records: dict[Mirror, _MirrorRecord] = {}
        self._only = False
        self._counted = False
        self._unreadable = ""
        self.received_bytes = 0
        """Bytes of chunks from mirrors since the start, wrong ones too."""
        self._taken = 0

    def use_announced(self, announced: Round) -> None:
        """Replace the server's mirrors by those that a round's announcement names. Thread-safe."""
        named, wrong = [], ""
        for text in announced.mirrors[:MOST_MIRRORS]:
            try:
                named.append(Mirror.parse(text))
            except ConfigError as error:
                wrong = error.message
        if wrong != self._unreadable:
            self._unreadable = wrong
            if wrong:
                self._report(f"the server names a mirror that is none: {wrong}")
        self._named = tuple(dict.fromkeys(named)) if self._allowed else ()
        self._only, self._counted = announced.mirrors_only, bool(announced.mirrors)
        known = {*self._own, *self._named}
        self._records = {mirror: record for mirror, record in self._records.items() if mirror in known}

    @property
    def fresh_bytes(self) -> int:
        """Bytes of chunks received from mirrors since :meth:`take_received`."""
        return self.received_bytes - self._taken

    def take_received(self) -> int:
        """Return and reset the number of bytes received from mirrors.

        The result is 0 if the server's announcement names no mirrors, because such a server may not know this count.
        """
        fresh, self._taken = self.fresh_bytes, self.received_bytes
        return fresh if self._counted else 0

    def bring(self, refs: Sequence[BlobRef], store: Store, cancelled: threading.Event) -> None:
        """Download as many chunks of ``refs`` into ``store`` as mirrors provide.

        Stops after two failed mirrors if the broker can provide the rest.

        Raises:
            RoundAborted: ``cancelled`` was set.
        """
        failed = 0
        for mirror in self._usable():
            wanted = list({ref.sha256: ref for ref, _ in store.missing(refs)}.values())
            if not wanted or (failed == _MOST_FAILED and not self._only):
                return
            failed += not self._fetch(mirror, wanted, store, cancelled)

    def check_broker(self) -> None:
        """Check that missing blobs may be downloaded from the broker, after mirrors did not provide them.

        Raises:
            RoundDeclined: The federation offers blobs at mirrors only, and this device may use none.
            BundleError: The federation offers blobs at mirrors only, and none delivered them.
        """
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
            f"{mirror}: {self._records[mirror].reported or 'left for a while'}"
            for mirror in asked
            if mirror in self._records
        )
        raise BundleError(
            f"{LOST_CHUNK}: no mirror gave all blobs of the round, and the broker has none: {faults}"
        )

    def _report(self, text: str) -> None:
        if self._log is not None:
            self._log.event("mirror", text)

    def _usable(self) -> Iterator[Mirror]:
        for mirror in dict.fromkeys((*self._own, *self._named)):
            if self._records.get(mirror, _MirrorRecord()).left_until <= time.monotonic():
                yield mirror

    def _fetch(
        self, mirror: Mirror, refs: Sequence[BlobRef], store: Store, cancelled: threading.Event
    ) -> bool:
        """Download the missing chunks of ``refs`` from one mirror into ``store``; return False if the mirror failed.
        RoundAborted if cancelled.
        """
        # The HTTP client takes 2.4 MB of a device, and most devices have no mirror.
        from edgefl.wire.mirror_client import BlobMissing, MirrorConnection, Watchdog

        record, lacks = self._records.setdefault(mirror, _MirrorRecord()), 0
        near, patience_s = mirror not in self._own, self._limits.fetch_timeout_s
        rate = _MinimumRate(0 if self._only else self._limits.mirror_bytes_s, patience_s)
        with (
            Watchdog(cancelled) as watchdog,
            MirrorConnection(
                mirror, watchdog, patience_s=patience_s, near=near, ca_file=self._ca_file
            ) as connection,
        ):
            for ref in refs:
                try:
                    for first, last in _runs(store.missing_chunks(ref)):
                        pieces = connection.pieces(
                            ref.sha256,
                            ref.size,
                            first=first * ref.chunk,
                            last=min(last * ref.chunk, ref.size),
                            step=ref.chunk,
                        )
                        self._keep(ref, first, pieces, store, rate)
                    record.faults, record.reported, lacks = 0, "", 0
                except MirrorError as error:
                    if cancelled.is_set():
                        raise RoundAborted("the round ended while its blobs were fetched") from error
                    lacks += 1
                    if isinstance(error, BlobMissing) and lacks < _MOST_LACKS:
                        continue
                    self._leave(mirror, record, f"blob {ref.sha256[:12]}: {error.message}")
                    return False
        return True

    def _keep(
        self, ref: BlobRef, first: int, pieces: Iterator[bytes], store: Store, rate: _MinimumRate
    ) -> None:
        for index, piece in enumerate(pieces, first):
            self.received_bytes += len(piece)
            if not ref.accepts(index, piece):
                raise MirrorError(f"chunk {index} has a wrong digest")
            store.put_chunk(ref, index, piece)
            rate.add(len(piece))

    def _leave(self, mirror: Mirror, record: _MirrorRecord, why: str) -> None:
        # Without a broker to replace it, it is tried again soon.
        doubled = 0 if self._only else min(record.faults, _MOST_DOUBLINGS)
        pause = self._limits.mirror_pause_s * 2.0**doubled
        record.faults += 1
        record.left_until = time.monotonic() + pause
        if why != record.reported:
            record.reported = why
            self._report(f"mirror {mirror} is left for {pause:g} s: {why}")


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of successive numbers in ascending ``indices``."""
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        yield run[0], run[-1] + 1
