"""``edgefl.tune``: find the variants of a bundle's graphs that this machine runs fastest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.api.device import most_threads
from edgefl.api.progress import reporting
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.limits import Limits
from edgefl_device.engine import open_engine
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.graph import tune_bundle
from edgefl_device.round.autotune import Autotuner, TuningResult
from edgefl_device.store.database import Store

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle


def tune(
    bundle: Bundle | str | Path,
    *,
    threads: int = 0,
    store: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, TuningResult]:
    """Time the variants of every graph of ``bundle`` on this machine, and numbers of threads, and return the fastest.

    All variants run on the same random inputs.

    Args:
        bundle: a compiled bundle, or its path.
        threads: most threads in training; 0: as a device's default, which is its processors.
        store: folder of a device's store, made if there is none, which keeps the result; None: nothing is kept.
        progress: called with the name of each graph before it is tried; by default a line in a terminal or a notebook
            shows it.

    Returns:
        Result by graph. ``variant`` is the fastest one, "" for the graph's own form, ``ms`` the quickest step of each
        variant in milliseconds. ``threads`` is the best number, 0 for the most, and ``threads_ms`` the milliseconds
        with each number. ``dropped`` has the variants that cannot run here, with the reason. {} for a bundle without
        variants.

    Raises:
        BundleError: the bundle is damaged.
        ConfigError: its engine is not installed.
        StoreError: the store is another release's, or in use by a running device.

    Example:
        >>> import edgefl
        >>> edgefl.tune(edgefl.compile("mlp"))
        {}
    """
    contents = read_bundle(Path(bundle)) if isinstance(bundle, str | Path) else bundle.contents
    engine = open_engine(contents.manifest.format, threads or 1, None, most_threads(threads, tune=True))
    limits = Limits()
    with tempfile.TemporaryDirectory(prefix="edgefl-tune-") as place:
        folder = BundleFolder.unpacked(contents, Path(place))
        kept = Store(
            Path(store) if store else Path(place) / "store",
            limit_bytes=limits.store_bytes,
            history_rounds=limits.history_rounds,
        )
        with closing(kept), reporting(progress=progress) as report:
            return tune_bundle(engine, folder, Autotuner(kept), report)
