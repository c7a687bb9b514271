"""Bit-exact repetition of a run from its journal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from edgefl.config import Federation, load, without_devices
from edgefl.errors import ConfigError
from edgefl.lab.run_folder import config_of, journal_of
from edgefl.setup.data import open_data
from edgefl.simulator.functions import SimulationPlan
from edgefl.simulator.replay import Replay, ReplayedRound, differences
from edgefl.wire import tensors
from edgefl.wire.tensors import Arrays
from edgefl_server.storage.checkpoints import Checkpoints
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import journal_at, place_of, store_at


@dataclass(frozen=True)
class Replayed:
    """Result of a repeated run.

    Attributes:
        rounds: the repeated rounds.
        first: number of the first round with other bits; None if all are equal.
        differ: number of different entries by tensor, compared with the checkpoint of that round. Empty if the
            checkpoint was not kept or all rounds are equal.
    """

    rounds: tuple[ReplayedRound, ...]
    first: int | None
    differ: dict[str, int]

    @property
    def same(self) -> bool:
        """True if the models of all repeated rounds equal those of the run to the bit, by the digests in its journal."""
        return self.first is None


def replay(
    folder: str | Path,
    federation: Federation | str | Path | None = None,
    *,
    database: str = "",
    data: str | Path | None = None,
    device: str = "auto",
    watch: Callable[[ReplayedRound], None] = lambda _: None,
) -> Replayed:
    """Repeat a run from the updates that its server kept, and compare each model with the digest in the journal.

    It stops after the first round that differs. The run must have set ``round.keep_updates``; it may be synchronous or
    buffered, finished or not.

    Args:
        folder: folder of the run, or of the server (``edgefl server --out``).
        federation: federation of the run; by default the file in the folder.
        database: SQLAlchemy URL of the journal, if it is not in the folder.
        data: folder with the dataset's standard files; by default as the federation file says.
        device: torch device that sums updates, or ``auto``.
        watch: function that is called with each repeated round.

    Returns:
        The repeated rounds and the first difference.

    Raises:
        ConfigError: if the folder holds no run, or one of another configuration.
        StoreError: if the bytes of updates are gone.
    """
    path = Path(folder).resolve()
    whole = without_devices(_federation(path, federation, data))
    url = database or journal_at(journal_of(path))
    updates = place_of(whole.server.updates, whole.federation.name, path)
    with (
        closing(Journal(url, whole.federation.name, store_at(updates))) as journal,
        TemporaryDirectory() as scratch,
    ):
        run = journal.latest_run()
        if run is None:
            raise ConfigError(
                f"the journal at {url} has no run of federation {whole.federation.name!r}", url=url
            )
        spec = SimulationPlan.of(whole, open_data(whole), device=device).spec
        checkpoints = Checkpoints(path)
        first = checkpoints.path(0)
        initial = checkpoints.load(0) if first.is_file() else spec.initial
        rounds: list[ReplayedRound] = []
        for each in Replay(spec, journal, run, initial, Path(scratch), device).rounds():
            rounds.append(each)
            watch(each)
            if not each.same:
                return Replayed(
                    tuple(rounds), each.round, _differ(each.weights, checkpoints.path(each.round))
                )
    return Replayed(tuple(rounds), None, {})


def _federation(
    folder: Path, federation: Federation | str | Path | None, data: str | Path | None
) -> Federation:
    if isinstance(federation, Federation):
        return federation
    path = Path(federation) if federation else config_of(folder)
    return load(path, {"data.dir": str(Path(data).resolve())} if data else {})


def _differ(weights: Arrays, checkpoint: Path) -> dict[str, int]:
    return differences(weights, tensors.load(checkpoint.read_bytes())) if checkpoint.is_file() else {}
