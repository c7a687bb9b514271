"""A real Postgres for tests, which may be stopped and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from edgefl.lab.broker import free_port
from tests import needs

_STARTED_S = 300.0


class Postgres:
    """One database of its own. Root may not run it: then the user `nobody` does, who may not look into pytest's folders."""

    def __init__(self) -> None:
        found = Path(needs.require("initdb")).parent
        pytest.importorskip("psycopg")
        self._algorithms = found
        self._place = tempfile.TemporaryDirectory(prefix="edgefl-postgres-", ignore_cleanup_errors=True)
        self._folder = Path(self._place.name)
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        made = ["--auth=trust", "--username=edgefl", "--no-sync", "--no-instructions"]
        subprocess.run(
            [found / "initdb", "-D", self._folder, *made],
            user=self._user,
            check=True,
            capture_output=True,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
        )
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://edgefl@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Returns once it answers."""
        options = ["-h", "127.0.0.1", "-p", str(self._port), "-k", str(self._folder), "-c", "fsync=off"]
        self._process = subprocess.Popen(
            [self._algorithms / "postgres", "-D", self._folder, *options],
            user=self._user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        import psycopg

        deadline = time.monotonic() + _STARTED_S
        while True:
            try:
                psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline and self._process.poll() is None, "Postgres did not start"
                time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a machine that fails: connections are cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_STARTED_S)
            self._process = None
