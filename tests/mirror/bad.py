"""All that a mirror may do wrong with one blob."""

from __future__ import annotations

import numpy as np

from tests.mirror.hostile import Behaviour, Talk

CHUNK = 1000
DATA = np.random.default_rng(0).bytes(20 * CHUNK - 1)


def head(length: int | None = len(DATA), more: str = "") -> str:
    told = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 200 OK\r\n{told}{more}\r\n"


def sends(*parts: bytes | str) -> Behaviour:
    def answer(talk: Talk) -> None:
        for part in parts:
            talk.send(part)

    return answer


def halts(*parts: bytes | str) -> Behaviour:
    def answer(talk: Talk) -> None:
        sends(*parts)(talk)
        talk.ended.wait()

    return answer


def repeats(first: str, again: bytes | str) -> Behaviour:
    def answer(talk: Talk) -> None:
        talk.send(first)
        while not talk.ended.is_set():
            talk.send(again)

    return answer


def drips(first: str, rest: bytes) -> Behaviour:
    def answer(talk: Talk) -> None:
        talk.send(first)
        for byte in rest:
            talk.send(bytes([byte]))
            if talk.ended.wait(0.05):
                return

    return answer


def status(code: int, more: str = "") -> Behaviour:
    return sends(f"HTTP/1.1 {code} No\r\nContent-Length: 2\r\n{more}\r\nno")


OK = "HTTP/1.1 200 OK\r\n"
CHUNKED = head(None, "Transfer-Encoding: chunked\r\n")
PART = f"HTTP/1.1 206 Partial\r\nContent-Range: bytes 1-{len(DATA)}/{len(DATA)}\r\n"
wrong = sends(head(), bytes(len(DATA)))
endless = repeats(head(None), DATA * 10)
ends_early = sends(head(), DATA[:2500])
hangs_up = sends()
USELESS = "it gave nothing of use in 0.5 s"
BAD: dict[str, tuple[Behaviour, tuple[str, ...]]] = {
    "wrong": (wrong, ("chunk 0 has a wrong digest",)),
    "endless chunks": (repeats(CHUNKED, b"3e8\r\n" + bytes(1000) + b"\r\n"), ("chunk 0 has a wrong digest",)),
    "endless headers": (
        repeats(OK, "X: " + "y" * 1000 + "\r\n"),
        ("HTTPException: got more than 100 headers",),
    ),
    "endless continue": (repeats("", "HTTP/1.1 100 Continue\r\n\r\n"), (USELESS,)),
    "silent": (halts(), (USELESS,)),
    "stalls": (halts(head(), DATA[:2500]), (USELESS,)),
    "drips": (drips(head(), DATA), (USELESS,)),
    "drips headers": (drips("", OK.encode() + b"X-A: b\r\n" * 100), (USELESS,)),
    "halts in headers": (halts(OK + "X-A: b\r\n"), (USELESS,)),
    "ends early": (ends_early, ("it ended early",)),
    "hangs up": (hangs_up, ("RemoteDisconnected",)),
    "says less": (sends(head(10), DATA[:10]), ("it sends 10 bytes, and the blob has 19999 there",)),
    "says more": (sends(head(1 << 60), DATA), ("it sends 1152921504606846976 bytes",)),
    "negative": (sends(head(-5)), ("it ended early", "chunk 0 has a wrong digest")),
    "another part": (
        sends(f"{PART}Content-Length: {len(DATA)}\r\n\r\n", DATA),
        ("it sends other bytes than the requested ones",),
    ),
    "not http": (sends(b"\x00\xff" * 500 + b"\r\n\r\n"), ("BadStatusLine",)),
    "broken chunks": (sends(CHUNKED + "zzzz\r\n"), ("it ended early", "IncompleteRead")),
    "zipped": (
        sends(head(len(DATA), "Content-Encoding: gzip\r\n"), DATA[::-1]),
        ("chunk 0 has a wrong digest",),
    ),
    "503": (status(503), ("it answers HTTP 503",)),
    "429": (status(429), ("it answers HTTP 429",)),
    "redirect": (
        status(302, "Location: http://127.0.0.1:1/\r\n"),
        ("it sends elsewhere (HTTP 302), which is not followed",),
    ),
}
"""What a mirror does, and what of it is told: one of these."""
