"""``edgefl.tune``: which forms of a bundle's graphs this machine runs fastest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.api.device import opened
from edgefl.api.progress import reporting
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.limits import Limits
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.tune import tuned
from edgefl_device.round.tuning import Choice, Tuning
from edgefl_device.store.database import Store

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle


def tune(
    bundle: Bundle | str | Path,
    *,
    threads: int = 0,
    store: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Choice]:
    """Try the forms of every step of ``bundle`` here, each beside the graph's own form on the same random inputs, and the
    fastest with fewer threads.

    Args:
        bundle: one that was compiled, or the path of one.
        threads: the most that the device will train with; 0: as a device's default, which is its processors.
        store: folder of a device's store, made where there is none, which then runs what was found; None: nothing is kept.
        progress: called with the name of each graph before it is tried; by default a line in a terminal or a notebook shows
            it.

    Returns:
        By graph: the form to run (``variant``, "" for its own), milliseconds of the quickest step of each form (``ms``), the
        threads to run it with (``threads``, 0 for the most) and its milliseconds with each number (``threads_ms``), and the
        forms that cannot run here, with the reason (``dropped``). Empty for a bundle without variants and one thread.

    Raises:
        BundleError: if the bundle is damaged.
        ConfigError: if its engine is not installed.
        StoreError: if the store is another release's, or in use by a running device.

    Example:
        >>> import edgefl
        >>> edgefl.tune(edgefl.compile("mlp"))
        {}
    """
    contents = read_bundle(Path(bundle)) if isinstance(bundle, str | Path) else bundle.contents
    engine = opened(contents.manifest.format, threads, tune=True)
    limits = Limits()
    with tempfile.TemporaryDirectory(prefix="edgefl-tune-") as place:
        folder = BundleFolder.unpacked(contents, Path(place))
        kept = Store(
            Path(store) if store else Path(place) / "store",
            limit_bytes=limits.store_bytes,
            history_rounds=limits.history_rounds,
        )
        with closing(kept), reporting(progress=progress) as report:
            return tuned(engine, folder, Tuning(kept), report)
