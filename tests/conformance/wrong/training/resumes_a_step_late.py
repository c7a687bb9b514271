"""Goes on behind the step that its checkpoint is about."""

from __future__ import annotations

from edgefl_device.store.checkpoint_rows import Checkpoint
from edgefl_device.store.database import Store

_checkpoint = Store.checkpoint


def plant() -> None:
    def later(self: Store, nonce: str) -> Checkpoint | None:
        saved = _checkpoint(self, nonce)
        if saved is None:
            return None
        return Checkpoint(saved.step + 1, saved.sums, saved.tensors, saved.basis)

    Store.checkpoint = later  # type: ignore[method-assign]
