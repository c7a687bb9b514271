"""The updates of a round out of the journal, as they are added by whoever did not take them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from edgefl_server.aggregate.aggregator import Checked
from edgefl_server.events import UpdateAccepted
from edgefl_server.intake.reading import check_codec, decoded
from edgefl_server.intake.reports import accepted_news
from edgefl_server.storage.journal import Journal
from edgefl_server.taking.active import ActiveRound


def added(
    journal: Journal, run: str, active: ActiveRound, shards: Collection[int] | None = None
) -> Iterator[tuple[UpdateAccepted, Checked, float]]:
    """The updates that the journal has of a round (of these ``shards`` only), each as it is told, as it is added, and the
    share of it that counts."""
    for stored in journal.accepted(run, active.number, shards):
        update = decoded(stored.data)
        check_codec(update, active.reading(update.tier, update.round).form)
        news = accepted_news(update, stored.sha256, stored.weight)
        yield news, active.check(update).added, stored.share
