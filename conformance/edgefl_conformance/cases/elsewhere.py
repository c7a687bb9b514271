"""Cases of pages and mirrors."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from edgefl.wire.blobs import describe
from edgefl.wire.mqtt.messages import Round, encode
from edgefl_conformance.case import Group
from edgefl_conformance.cases.blobs import damaged, fresh, with_line
from edgefl_conformance.material.bundles import unit_bytes
from edgefl_conformance.play.stage import Play, Stage
from edgefl_conformance.verdict import Failed, expect

# A mirror of blobs: a small server of HTTP, which gives what it is told to.


class BlobMirror:
    """``blobs`` by digest, as they are given; ``asked`` are those that somebody asked for. ``tls``: a certificate."""

    def __init__(self, blobs: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.removeprefix("/")
                asked.append(name)
                data = blobs.get(name)
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="mirror", daemon=True).start()

    def close(self) -> None:
        """No requests any more."""
        self._server.shutdown()
        self._server.server_close()


def mirrored(blobs: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> closing[BlobMirror]:
    """Return a mirror that the ``with`` statement closes."""
    return closing(BlobMirror(blobs, tls))


ELSEWHERE = Group("elsewhere")
_MIRRORED_S = 8.0


@ELSEWHERE.case("Reads what a round offers from a page, where the announcement has one.", optional=True)
def pages(stage: Stage) -> None:
    what, announced = stage.prepare()
    task = stage.task(announced, what)
    given = stage.give(announced.paged(stage.server.put(announced.page)), task, what)
    received = stage.update_or_none(task, _MIRRORED_S, given.mark)
    if received is None:
        raise Failed("an update for a round whose offers are on a page", stage.instead(given.mark))
    stage.settle(Play(announced, task, what, given.mark))


@ELSEWHERE.case("Refuses a Round with a page that is of version 1, or that says twice what it offers.")
def page_of_another_version(stage: Stage) -> None:
    stage.ensure()
    what = stage.material()
    for change in ({"v": 1}, {"v": 3, "both": True}):
        announced = stage.announcement(*stage.offer(what))
        page = stage.server.put(announced.page)
        wrong = msgspec.structs.replace(
            announced if "both" in change else announced.paged(page), v=change["v"], pages=page
        )
        mark = stage.server.log.mark()
        topic = stage.server.topics.current_round
        stage.server.publish(topic, stage.server.seal_body(Round, topic, encode(wrong)), retain=True)
        stage.server.say(stage.task(announced, what))
        stage.quiet(mark, "no update for a Round that contradicts itself")
    stage.good_round()


@ELSEWHERE.case("Asks for nothing of a page that is larger than any manifest may be.")
def page_too_large(stage: Stage) -> None:
    what, announced = stage.prepare()
    page = msgspec.structs.replace(
        describe(announced.page, 1 << 17), size=1 << 30, digests=bytes(32 * (1 << 13))
    )
    begun = time.monotonic()
    stage.give(announced.paged(page), stage.task(announced, what), what)
    time.sleep(stage.patient(0.7))
    asked = [each for each in stage.relay.subscriptions(begun) if page.sha256 in each.topic]
    expect(not asked, "no subscription to a page of 1 GiB", f"{len(asked)} of them")
    stage.good_round()


@ELSEWHERE.case(
    "Fetches from a mirror that the announcement names what the broker does not have.", optional=True
)
def mirrors(stage: Stage) -> None:
    what = fresh(stage.material(), "mirrors")
    unit = what.manifest.suffix[0]
    data = unit_bytes(what.units[unit])
    ref = describe(data, 4096)
    with mirrored({ref.sha256: data}) as mirror:
        stage.ensure()
        offer, units = stage.offer(what, but=unit)
        announced = msgspec.structs.replace(
            stage.announcement(offer, {**units, unit: (ref,)}), mirrors=(mirror.url,)
        )
        play = stage.give(announced, stage.task(announced, what), what)
        if stage.update_or_none(play.task, _MIRRORED_S, play.mark) is None:
            stage.close(play)
            raise Failed("an update by weights that are at a mirror only", stage.instead(play.mark))
        stage.settle(play)


@ELSEWHERE.case("Believes no mirror: where one gives other bytes, it takes the broker's.")
def lying_mirror(stage: Stage) -> None:
    what = fresh(stage.material(), "lies")
    unit = what.manifest.suffix[0]
    data = unit_bytes(what.units[unit])
    ref = describe(data, 4096)
    with mirrored({ref.sha256: damaged(data)}) as mirror:

        def named(announced: Round) -> Round:
            ref = stage.server.put(data, 4096)
            return msgspec.structs.replace(with_line(announced, unit, (ref,)), mirrors=(mirror.url,))

        stage.settle(stage.open(what, change=named))


@ELSEWHERE.case("Asks a mirror for nothing but blobs, and the broker for what a mirror does not have.")
def asks_for_blobs_only(stage: Stage) -> None:
    what = fresh(stage.material(), "only")
    with mirrored({}) as mirror:
        stage.settle(
            stage.open(
                what, change=lambda announced: msgspec.structs.replace(announced, mirrors=(mirror.url,))
            )
        )
        odd = [name for name in mirror.asked if len(name) != 64]
        expect(not odd, "requests for blobs alone", ", ".join(odd))
