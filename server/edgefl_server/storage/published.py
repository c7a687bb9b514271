"""Published models on disk, so that a restarted server can publish the same bytes again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import MALFORMED
from edgefl_server.storage.checkpoints import store

Blobs = dict[str, bytes]
Lines = dict[str, tuple[BlobRef, ...]]


class PublishedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one published model: per name a whole blob and the patches since, and the blobs new in this record.

    A name's whole blob is in the record that began its line, also if it was published before. ``oldest`` is the number
    of the oldest record that holds any of the others. ``model`` is the version of the model it was made from.
    """

    run: str
    model: str
    oldest: int
    lines: Lines
    blobs: Blobs


class PublishedModels:
    """``published/round-0007.msgpack`` below ``folder``: a record per published model of ``run``, 0 for the initial one.

    Those of another run, which an earlier server left in the folder, are as good as none.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder / "published"
        self.run = run

    def save(self, number: int, record: PublishedModel) -> None:
        """Keep a record, whole or not at all, on disk before this returns."""
        store(self._path(number), msgspec.msgpack.encode(record))

    def load(self, number: int, model: str) -> tuple[PublishedModel, Blobs] | None:
        """The record and all blobs that its lines name, as they travelled; None if any is missing or damaged, or if it
        was made from another model."""
        record = self._read(number)
        if record is None or record.model != model:
            return None
        blobs = dict(record.blobs)
        for earlier in range(record.oldest, number):
            earlier_record = self._read(earlier)  # one without new blobs may be gone
            blobs |= earlier_record.blobs if earlier_record is not None else {}
        wanted = {ref.sha256 for line in record.lines.values() for ref in line}
        whole = all(hashlib.sha256(blobs.get(name, b"")).hexdigest() == name for name in wanted)
        return (record, {name: blobs[name] for name in wanted}) if whole else None

    def prune(self, oldest: int, newest: int) -> None:
        """Delete all records but those of the numbers ``oldest`` to ``newest``."""
        for path in self._folder.glob("round-*.msgpack"):
            number = path.stem.removeprefix("round-")
            if number.isdigit() and not oldest <= int(number) <= newest:
                path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"round-{number:04d}.msgpack"

    def _read(self, number: int) -> PublishedModel | None:
        try:
            record = msgspec.msgpack.decode(self._path(number).read_bytes(), type=PublishedModel)
        except (OSError, *MALFORMED):
            return None
        return record if record.run == self.run else None
