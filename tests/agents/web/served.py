"""The page's server as the process that it is, with a page of any files: what it answers does not depend on them."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from edgefl.lab.broker import free_port
from edgefl.web.page import PACKED, VARIABLE, WebSettings
from tests.support.http import Answer, ask

FEDERATION = """
[federation]
name = "garden"
[model]
name = "mlp"
[data]
name = "digits"
[tiers.strong]
devices = ["strong-*"]
[tiers.weak]
cut = 1
devices = ["weak-?", "weak-*"]
"""
SECRET = "a-secret-of-22-letters"
WASM, CODE = "ort/ort-wasm-simd-threaded.wasm", b"\0asm" + bytes(1000)


def page_of_files(folder: Path) -> Path:
    """A folder that looks built."""
    (folder / "ort").mkdir(parents=True, exist_ok=True)
    for name in ("index.html", "worker.js"):
        (folder / name).write_text(f"<!doctype html><title>{name}</title>")
    (folder / f"{WASM}{PACKED}").write_bytes(gzip.compress(CODE))
    return folder


@dataclass
class WebProcess:
    """``python -m edgefl.web``, ready when the block begins. ``more``: fields of its settings; ``page``: the built one."""

    folder: Path
    federation: str = FEDERATION
    more: dict[str, Any] = field(default_factory=dict)
    authority: str = ""
    page: Path | None = None

    def __enter__(self) -> WebProcess:
        own = self.folder / "web"
        own.mkdir(parents=True, exist_ok=True)
        (own / "federation.toml").write_text(self.federation)
        self.port = free_port()
        scheme = "https" if self.authority else "http"
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        settings = WebSettings(
            **{
                "folder": str(own),
                "host": "127.0.0.1",
                "port": self.port,
                "secret": SECRET,
                "address": f"{self.url}/#{SECRET}",
                **self.more,
            }
        )
        files = str(self.page or page_of_files(self.folder / "page"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgefl.web"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, VARIABLE: files},
        )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(msgspec.json.encode(settings))
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "the page does not listen"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(300)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def get(self, path: str, **headers: str) -> Answer:
        return ask(self.url, "GET", path, headers, authority=self.authority)

    def asked(self, path: str) -> Answer:
        """With the secret."""
        return self.get(f"{path}{'&' if '?' in path else '?'}join={SECRET}")

    def _answers(self) -> bool:
        try:
            return self.get("/").status == 200
        except OSError:
            return False
