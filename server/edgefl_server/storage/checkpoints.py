"""Model files of a run: checkpoints after each round, and records of published models. A file is complete or absent."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from edgefl.errors import ProtocolError, StoreError
from edgefl.system.files import make_folder, write_whole
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import MALFORMED
from edgefl.wire.tensors import Array, Arrays

KEPT = 3


class Checkpoints:
    """Model files of a run in ``folder``, which is created.

    They are the checkpoints ``checkpoints/round-0007.safetensors`` and the trained model ``model.safetensors``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder / "checkpoints", private=True)

    @property
    def model(self) -> Path:
        """Path of the trained model."""
        return self._folder / "model.safetensors"

    def path(self, number: int) -> Path:
        """Return the path of the model after round ``number``; 0 for the initial model."""
        return self._folder / "checkpoints" / f"round-{number:04d}.safetensors"

    def save(self, number: int, weights: Mapping[str, Array]) -> str:
        """Write the model after round ``number`` and return the SHA-256 of the file. Earlier checkpoints stay.

        Raises:
            StoreError: If the file cannot be written.
        """
        return store(self.path(number), tensors.dump(weights), private=True)

    def prune(self, newest: int, keep: Collection[int] = ()) -> None:
        """Delete the checkpoints of rounds up to ``newest``, except its last three and those of the rounds in
        ``keep``.
        """
        for path in self.path(0).parent.glob("round-*.safetensors"):
            number = path.stem.removeprefix("round-")
            if number.isdigit() and int(number) <= newest - KEPT and int(number) not in keep:
                path.unlink(missing_ok=True)

    def load(self, number: int) -> Arrays:
        """Return the tensors of the model after round ``number``, by name.

        Raises:
            StoreError: If the file is missing or damaged.
        """
        path = self.path(number)
        try:
            return tensors.load(path.read_bytes())
        except (OSError, ProtocolError) as error:
            raise StoreError(
                f"the journal says round {number} ended, but its checkpoint {path} cannot be read ({error}); "
                "restore the file, or start over in another folder",
                path=str(path),
            ) from error

    def finish(self, weights: Mapping[str, Array]) -> str:
        """Write the trained model to :attr:`model` and return the SHA-256 of the file.

        Raises:
            StoreError: If the file cannot be written.
        """
        return store(self.model, tensors.dump(weights))


def store(path: Path, data: bytes, *, private: bool = False) -> str:
    """Write ``data`` to ``path`` atomically, durable before this returns. Return the SHA-256 of ``data``.

    Args:
        path: The file. Missing folders are created.
        data: Its new content.
        private: True if only the owner may read it.

    Raises:
        StoreError: If the file cannot be written.
    """
    try:
        make_folder(path.parent, private=private)
        write_whole(path, data, durable=True, private=private)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path} cannot be written ({reason}): free some space, or choose another folder", path=str(path)
        ) from error
    return hashlib.sha256(data).hexdigest()


Blobs = dict[str, bytes]
Lines = dict[str, tuple[BlobRef, ...]]


class PublishedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one published model, with which a restarted server publishes the same bytes.

    Attributes:
        run: Identifier of the run.
        model: Version of the model.
        oldest: Number of the oldest record with a blob that ``lines`` names.
        lines: References of the complete blob and its patches, by the name of the published part.
        blobs: Bytes of the blobs that are new in this record, by SHA-256.
    """

    run: str
    model: str
    oldest: int
    lines: Lines
    blobs: Blobs


class PublishedModels:
    """Records of the published models of ``run``, in files ``published/round-0007.msgpack`` of ``folder``.

    Number 0 is the initial model. Records of another run, which an earlier server left in the folder, are treated as
    missing.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder / "published"
        self.run = run

    def save(self, number: int, record: PublishedModel) -> None:
        """Write a record atomically, durable before this returns.

        Raises:
            StoreError: If the file cannot be written.
        """
        store(self._path(number), msgspec.msgpack.encode(record))

    def load(self, number: int, model: str) -> tuple[PublishedModel, Blobs] | None:
        """Return (record of round ``number``, encoded bytes of all blobs that it names by SHA-256).

        The result is None if a record or blob is missing or damaged, or if the record is of another version than
        ``model``.
        """
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
        """Delete all records except those numbered ``oldest`` to ``newest``."""
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
