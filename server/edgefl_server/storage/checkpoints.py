"""The model after each round as safetensors files that are whole or not there, equal weights giving equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from edgefl.errors import ProtocolError, StoreError
from edgefl.system.files import make_folder, write_whole
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays

KEPT = 3


class Checkpoints:
    """``checkpoints/round-0007.safetensors`` and, at the end, ``model.safetensors`` below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder / "checkpoints", private=True)

    @property
    def model(self) -> Path:
        return self._folder / "model.safetensors"

    def path(self, number: int) -> Path:
        """File of the model after round ``number``; 0 is the initial model."""
        return self._folder / "checkpoints" / f"round-{number:04d}.safetensors"

    def save(self, number: int, weights: Mapping[str, Array]) -> str:
        """Write the model after a round; SHA-256 of the file. The round before is kept until this one is journaled."""
        return store(self.path(number), tensors.dump(weights), private=True)

    def prune(self, newest: int, keep: Collection[int] = ()) -> None:
        """Delete all but the last files up to round ``newest``, and those of the rounds in ``keep``."""
        for path in self.path(0).parent.glob("round-*.safetensors"):
            number = path.stem.removeprefix("round-")
            if number.isdigit() and int(number) <= newest - KEPT and int(number) not in keep:
                path.unlink(missing_ok=True)

    def load(self, number: int) -> Arrays:
        """The model after round ``number``; StoreError if the file is missing or damaged."""
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
        """Write the trained model; SHA-256 of the file."""
        return store(self.model, tensors.dump(weights))


def store(path: Path, data: bytes, *, private: bool = False) -> str:
    """Replace ``path`` by ``data``, on disk before this returns. Return the SHA-256 of ``data``.

    ``private``: only the owner may read it. StoreError if it cannot be written.
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
