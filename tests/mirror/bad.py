"""All that a mirror may do wrong with one blob."""

from __future__ import annotations

import numpy as np

from tests.mirror.hostile import Behaviour, Talk

CHUNK = 1000
DATA = np.random.default_rng(0).bytes(20 * CHUNK - 1)


def head(length: int | None = len(DATA), more: str = "") -> str:
    told = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 200 OK\r\n{told}{more}\r\n"


def wrong(talk: Talk) -> None:
    talk.send(head())
    talk.send(bytes(len(DATA)))


def endless(talk: Talk) -> None:
    talk.send(head(None))
    while not talk.ended.is_set():
        talk.send(DATA * 10)


def endless_chunks(talk: Talk) -> None:
    talk.send(head(None, "Transfer-Encoding: chunked\r\n"))
    while not talk.ended.is_set():
        talk.send(b"3e8\r\n" + bytes(1000) + b"\r\n")


def endless_headers(talk: Talk) -> None:
    talk.send("HTTP/1.1 200 OK\r\n")
    while not talk.ended.is_set():
        talk.send("X: " + "y" * 1000 + "\r\n")


def endless_continue(talk: Talk) -> None:
    while not talk.ended.is_set():
        talk.send("HTTP/1.1 100 Continue\r\n\r\n")


def silent(talk: Talk) -> None:
    talk.ended.wait()


def stalls(talk: Talk) -> None:
    talk.send(head())
    talk.send(DATA[:2500])
    talk.ended.wait()


def drips(talk: Talk) -> None:
    talk.send(head())
    for byte in DATA:
        talk.send(bytes([byte]))
        if talk.ended.wait(0.05):
            return


def drips_headers(talk: Talk) -> None:
    for letter in "HTTP/1.1 200 OK\r\n" + "X-A: b\r\n" * 100:
        talk.send(letter)
        if talk.ended.wait(0.05):
            return


def halts_in_headers(talk: Talk) -> None:
    talk.send("HTTP/1.1 200 OK\r\nX-A: b\r\n")
    talk.ended.wait()


def ends_early(talk: Talk) -> None:
    talk.send(head())
    talk.send(DATA[:2500])


def hangs_up(talk: Talk) -> None:
    return None


def says_less(talk: Talk) -> None:
    talk.send(head(10))
    talk.send(DATA[:10])


def says_more(talk: Talk) -> None:
    talk.send(head(1 << 60))
    talk.send(DATA)


def negative(talk: Talk) -> None:
    talk.send("HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n")


def another_part(talk: Talk) -> None:
    talk.send(
        f"HTTP/1.1 206 Partial\r\nContent-Range: bytes 1-{len(DATA)}/{len(DATA)}\r\nContent-Length: {len(DATA)}\r\n\r\n"
    )
    talk.send(DATA)


def not_http(talk: Talk) -> None:
    talk.send(b"\x00\xff" * 500 + b"\r\n\r\n")


def broken_chunks(talk: Talk) -> None:
    talk.send(head(None, "Transfer-Encoding: chunked\r\n") + "zzzz\r\n")


def zipped(talk: Talk) -> None:
    talk.send(head(len(DATA), "Content-Encoding: gzip\r\n"))
    talk.send(DATA[::-1])


def status(code: int, more: str = "") -> Behaviour:
    def answer(talk: Talk) -> None:
        talk.send(f"HTTP/1.1 {code} No\r\nContent-Length: 2\r\n{more}\r\nno")

    return answer


REDIRECT = status(302, "Location: http://127.0.0.1:1/\r\n")
BAD: dict[Behaviour, tuple[str, ...]] = {
    wrong: ("chunk 0 has a wrong digest",),
    endless_chunks: ("chunk 0 has a wrong digest",),
    endless_headers: ("HTTPException: got more than 100 headers",),
    endless_continue: ("it gave nothing of use in 0.5 s",),
    silent: ("it gave nothing of use in 0.5 s",),
    stalls: ("it gave nothing of use in 0.5 s",),
    drips: ("it gave nothing of use in 0.5 s",),
    drips_headers: ("it gave nothing of use in 0.5 s",),
    halts_in_headers: ("it gave nothing of use in 0.5 s",),
    ends_early: ("it ended early",),
    hangs_up: ("RemoteDisconnected",),
    says_less: ("it sends 10 bytes, and the blob has 19999 there",),
    says_more: ("it sends 1152921504606846976 bytes",),
    negative: ("it ended early", "chunk 0 has a wrong digest"),
    another_part: ("it sends other bytes than the requested ones",),
    not_http: ("BadStatusLine",),
    broken_chunks: ("it ended early", "IncompleteRead"),
    zipped: ("chunk 0 has a wrong digest",),
    status(503): ("it answers HTTP 503",),
    status(429): ("it answers HTTP 429",),
    REDIRECT: ("it sends elsewhere (HTTP 302), which is not followed",),
}
"""What a mirror does, and what of it is told: one of these."""
