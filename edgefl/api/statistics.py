"""Statistics of the devices' data without training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from edgefl.api.progress import reporting
from edgefl.api.run import prepare
from edgefl.api.serve import Server
from edgefl.config import Federation
from edgefl.errors import ParticipationError
from edgefl.lab.lab import ServerEvent
from edgefl.wire.statistics import Statistic, StatisticsRequest
from edgefl_server.events import DataStatistics, Event
from edgefl_server.storage.audit import rounds_of


def statistics(
    federation: Federation | str | Path,
    out: str | Path = "",
    *,
    ask: Sequence[Statistic] = (),
    edges: Sequence[float] = (),
    devices: int = 0,
    agents: Mapping[str, int] | None = None,
    broker: str = "",
    sign_key: str | Path | None = None,
    enrolled: str | Path | None = None,
    watch: Callable[[Event | ServerEvent], None] | None = None,
) -> DataStatistics:
    """Ask devices for statistics of their data. Nothing is trained, and no model is published.

    Without ``broker``, the federation's devices are started on this machine, as :func:`edgefl.run` does. With it, a server
    asks the devices that are connected to this broker and ends after one round.

    Args:
        federation: objects (:func:`edgefl.federation`), or their file; its devices, shape of samples, classes,
            ``[evaluate] least_group`` and deadline.
        out: folder of the round; the same request there continues a round that was interrupted. By default a temporary
            one.
        ask: names of statistics: classes, moments, missing, histogram, lengths. Default: all that such data have.
        edges: ascending edges of a histogram's bins, in the values that a model reads.
        devices: number of devices to wait for. 0: ``round.min_devices`` if that is above 1, else all that connect within
            10 s.
        agents: without ``broker``, the number of devices of each kind, as of :func:`edgefl.run`.
        broker: ``host:port`` or an address; the federation's table ``[broker]`` names certificates and passwords.
        sign_key: file with the server's key, as of :class:`edgefl.Server`.
        enrolled: list of the devices that may join, as of :class:`edgefl.Server`.
        watch: called with each event.

    Returns:
        Exact counts and moments, over all devices and by tier, and the normalisation of inputs by them.

    Raises:
        ConfigError: the data do not have a statistic that ``ask`` names, or ``out`` holds another run.
        ParticipationError: no device reported.
    """
    request = StatisticsRequest(ask=tuple(ask), edges=tuple(map(float, edges)), devices=devices)
    with ExitStack() as stack:
        folder = (
            Path(out) if out else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-")))
        )
        if not broker:
            return _ask_lab(federation, folder, request, agents, watch)
        server = Server(
            federation,
            folder,
            broker=broker,
            sign_key=sign_key,
            enrolled=enrolled,
            emit=watch or (lambda _: None),
            evaluate=request,
        )
        server.run()
        return _result(folder)


def _ask_lab(
    federation: Federation | str | Path,
    folder: Path,
    request: StatisticsRequest,
    agents: Mapping[str, int] | None,
    watch: Callable[[Event | ServerEvent], None] | None,
) -> DataStatistics:
    """Start broker, server and devices on this machine for one round, and return the results."""
    with reporting("reading the data and looking at the tiers"):
        prepared = prepare(federation, folder, agents=agents, statistics=request)
    with ExitStack() as stack:
        stack.callback(prepared.lock.release)
        stack.callback(prepared.lab.stop)
        report = None if watch else stack.enter_context(reporting("starting the processes"))
        prepared.lab.start()
        for news in prepared.lab.events():
            if not isinstance(news, ServerEvent):
                continue
            if watch is not None:
                watch(news)
            elif report is not None:
                report.report_event(news.event)
        prepared.lab.finish()
    return _result(folder)


def _result(folder: Path) -> DataStatistics:
    """Return the statistics of the last round in ``folder``.

    Raises:
        ParticipationError: no device reported.
    """
    rounds = rounds_of(folder)
    if not rounds or rounds[-1].statistics is None:
        reason = rounds[-1].text if rounds else ""
        raise ParticipationError(f"no device reported statistics: {reason or 'the round did not end'}")
    return rounds[-1].statistics
