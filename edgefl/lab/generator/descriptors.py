"""Whether this process may open as many connections as it is to have."""

from __future__ import annotations

import resource
from pathlib import Path

from edgefl.wire.errors import ConfigError

_OTHERS = 128
"""Files beside the connections: libraries, pipes, what a measurement reads."""
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_room(connections: int) -> None:
    """Raise the limit on open files as far as it is needed; ConfigError says how where that is not allowed."""
    needed = connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{connections} connections need {needed} open files, and this process may have {hard}: raise the limit "
            f"(`ulimit -Hn {needed}` as root, LimitNOFILE in a systemd unit), or load with fewer devices",
            needed=needed,
            limit=hard,
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    ports = _ports()
    if ports and connections > ports:
        raise ConfigError(
            f"{connections} connections from one address need as many ports, and this system gives {ports} "
            f"({_PORTS}): widen that range, or load from several machines, each with another `first`",
            limit=ports,
        )


def _ports() -> int:
    """How many outgoing connections to one listener there can be; 0: unknown."""
    try:
        first, last = _PORTS.read_text(encoding="ascii").split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return 0
