"""Connection to a Ray cluster, or to a Ray that is started on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from types import ModuleType

from edgefl.errors import ConfigError, EdgeflError

LOCAL = "local"
"""Address of a Ray that is started for one process, on this machine."""
_REACHED_S = 10.0


def import_ray(what: str, table: str) -> ModuleType:
    """Return the module ``ray``. Raises ConfigError if it is not installed.

    The error says ``what`` runs on it, and names the configuration ``table`` that has the setting ``ray``.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigError(
            f"{what} on Ray, which is not installed: `pip install edgefl-tiers[ray]`, or leave out {table}.ray"
        ) from error
    module: ModuleType = ray
    return module


def check_room(
    ray: ModuleType, address: str, workers: int, table: str, refused: type[EdgeflError], gpus: int = 0
) -> int:
    """Return the cores of the cluster. Raise ``refused`` if it is too small: Ray itself would wait without limit.

    Each of ``workers`` takes one core, and ``gpus``. The error names the configuration ``table`` that has the setting.
    """
    there = ray.cluster_resources()
    for name, what, each in (("CPU", "cores", 1), ("GPU", "GPUs", gpus)):
        found = int(there.get(name, 0))
        if found < each * workers:
            raise refused(
                f"the Ray cluster at {address} has {found} {what} for {workers} workers, which take one each: set "
                f"{table}.workers to at most that, or add nodes",
                address=address,
                found=found,
            )
    return int(there.get("CPU", 0))


def connect(ray: ModuleType, address: str, workers: int) -> None:
    """Connect to the cluster at ``address``, or start a Ray with a core for each of ``workers`` if it is :data:`LOCAL`.

    Raises OSError if no process listens there: Ray itself retries for minutes, and then ends this process.
    """
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    in_main = threading.current_thread() is threading.main_thread()
    stops = signal.getsignal(signal.SIGTERM) if in_main else None
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(LOCAL, num_cpus=workers, include_dashboard=False, **quiet)
    else:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
        ray.init(address, **quiet)
    if stops is not None:  # Ray's own handler ends the process with another exit code, and without a message
        signal.signal(signal.SIGTERM, stops)
