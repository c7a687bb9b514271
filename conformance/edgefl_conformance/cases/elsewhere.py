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
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.cases.blobs import damaged, fresh, with_line
from edgefl_conformance.material.bundles import unit_bytes
from edgefl_conformance.play.harness import Play, RoundHarness
from edgefl_conformance.results import CaseFailed, expect


class BlobMirror:
    """HTTP server of ``blobs`` by digest, with TLS by a certificate; ``asked`` lists the requested names."""

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
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def mirrored(blobs: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> closing[BlobMirror]:
    """Return a mirror that the ``with`` statement closes."""
    return closing(BlobMirror(blobs, tls))


ELSEWHERE = CaseGroup("elsewhere")
_MIRRORED_S = 8.0


@ELSEWHERE.case("Reads what a round offers from a page, where the announcement has one.", optional=True)
def pages(harness: RoundHarness) -> None:
    what, announced = harness.prepare()
    task = harness.task(announced, what)
    given = harness.give(announced.paged(harness.server.put(announced.page)), task, what)
    received = harness.update_or_none(task, _MIRRORED_S, given.mark)
    if received is None:
        raise CaseFailed("an update for a round whose offers are on a page", harness.instead(given.mark))
    harness.settle(Play(announced, task, what, given.mark))


@ELSEWHERE.case("Refuses a Round with a page that is of version 1, or that says twice what it offers.")
def page_of_another_version(harness: RoundHarness) -> None:
    harness.ensure()
    what = harness.material()
    for change in ({"v": 1}, {"v": 3, "both": True}):
        announced = harness.announcement(*harness.offer(what))
        page = harness.server.put(announced.page)
        wrong = msgspec.structs.replace(
            announced if "both" in change else announced.paged(page), v=change["v"], pages=page
        )
        mark = harness.server.log.mark()
        topic = harness.server.topics.current_round
        harness.server.publish(topic, harness.server.seal_body(Round, topic, encode(wrong)), retain=True)
        harness.server.say(harness.task(announced, what))
        harness.quiet(mark, "no update for a Round that contradicts itself")
    harness.good_round()


@ELSEWHERE.case("Asks for nothing of a page that is larger than any manifest may be.")
def page_too_large(harness: RoundHarness) -> None:
    what, announced = harness.prepare()
    page = msgspec.structs.replace(
        describe(announced.page, 1 << 17), size=1 << 30, digests=bytes(32 * (1 << 13))
    )
    begun = time.monotonic()
    harness.give(announced.paged(page), harness.task(announced, what), what)
    time.sleep(harness.patient(0.7))
    asked = [each for each in harness.relay.subscriptions(begun) if page.sha256 in each.topic]
    expect(not asked, "no subscription to a page of 1 GiB", f"{len(asked)} of them")
    harness.good_round()


@ELSEWHERE.case(
    "Fetches from a mirror that the announcement names what the broker does not have.", optional=True
)
def mirrors(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "mirrors")
    unit = what.manifest.suffix[0]
    data = unit_bytes(what.units[unit])
    ref = describe(data, 4096)
    with mirrored({ref.sha256: data}) as mirror:
        harness.ensure()
        offer, units = harness.offer(what, but=unit)
        announced = msgspec.structs.replace(
            harness.announcement(offer, {**units, unit: (ref,)}), mirrors=(mirror.url,)
        )
        play = harness.give(announced, harness.task(announced, what), what)
        if harness.update_or_none(play.task, _MIRRORED_S, play.mark) is None:
            harness.close(play)
            raise CaseFailed("an update by weights that are at a mirror only", harness.instead(play.mark))
        harness.settle(play)


@ELSEWHERE.case("Believes no mirror: where one gives other bytes, it takes the broker's.")
def lying_mirror(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "lies")
    unit = what.manifest.suffix[0]
    data = unit_bytes(what.units[unit])
    ref = describe(data, 4096)
    with mirrored({ref.sha256: damaged(data)}) as mirror:

        def named(announced: Round) -> Round:
            ref = harness.server.put(data, 4096)
            return msgspec.structs.replace(with_line(announced, unit, (ref,)), mirrors=(mirror.url,))

        harness.settle(harness.open(what, change=named))


@ELSEWHERE.case("Asks a mirror for nothing but blobs, and the broker for what a mirror does not have.")
def asks_for_blobs_only(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "only")
    with mirrored({}) as mirror:
        harness.settle(
            harness.open(
                what, change=lambda announced: msgspec.structs.replace(announced, mirrors=(mirror.url,))
            )
        )
        odd = [name for name in mirror.asked if len(name) != 64]
        expect(not odd, "requests for blobs alone", ", ".join(odd))
