"""Cases of an agent's connection, status, hello, will, and leaving."""

from __future__ import annotations

import re
import time

import msgspec

from edgefl.wire.enrolment import new_token, proves
from edgefl.wire.mqtt.messages import COME_LATER, Ack, Hello, Round, Status
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import RoundHarness
from edgefl_conformance.play.messages import AgentMessage
from edgefl_conformance.play.packets import Connect, Disconnect
from edgefl_conformance.results import CaseFailed, expect, expect_equal

JOINING = CaseGroup("joining")
_LEAST_KEEPALIVE_S, _MOST_KEEPALIVE_S = 1, 60


@JOINING.case(
    "Connects under its own client id, with a session that stays, a keep-alive, and subscribes to its topics at QoS 1."
)
def connects(harness: RoundHarness) -> None:
    begun = time.monotonic()
    harness.start()
    if not harness.relay.reads:
        return
    connect = _connect_of(harness, begun)
    expect(
        re.fullmatch("[0-9A-Za-z]{23}", connect.client_id) is not None,
        "a client id of 23 letters and digits that nobody can guess",
        repr(connect.client_id),
    )
    expect(not connect.clean, "clean session false (clean start false)", "true")
    keepalive = _LEAST_KEEPALIVE_S <= connect.keepalive_s <= _MOST_KEEPALIVE_S
    expect(keepalive, "a keep-alive of 20 s, at most a minute", f"{connect.keepalive_s} s")
    root = f"{harness.server.topics.root}"
    wanted = {f"{root}/rounds/current", harness.server.mine.tasks, harness.server.mine.acks}
    until = time.monotonic() + harness.patient(5.0)
    while time.monotonic() < until:
        asked = {each.topic: each.qos for each in harness.relay.subscriptions(begun)}
        if wanted <= set(asked):
            break
        time.sleep(0.05)
    expect(
        wanted <= set(asked),
        f"subscriptions to {', '.join(sorted(wanted))}",
        ", ".join(sorted(asked)) or "none",
    )
    low = [topic for topic in wanted if asked[topic] != 1]
    expect(not low, "QoS 1 for each of these", f"another for {', '.join(low)}")


@JOINING.case(
    "Has a last will: Status offline on its own topic, QoS 1, retained, signed with the second number of the connection."
)
def will(harness: RoundHarness) -> None:
    begun, mark = time.monotonic(), harness.server.log.mark()
    agent = harness.restart() if harness.agent is not None else harness.start()
    online = harness.status(mark, online=True)
    if harness.relay.reads:
        connect = _connect_of(harness, begun)
        expect(bool(connect.will_topic), "a will in CONNECT", "none")
        expect_equal("topic of the will", harness.server.mine.status, connect.will_topic)
        expect(
            connect.will_qos == 1 and connect.will_retained,
            "a will of QoS 1, retained",
            f"QoS {connect.will_qos}, retained {connect.will_retained}",
        )
    after = harness.server.log.mark()
    agent.kill()
    offline = harness.status(after, online=False)
    expect(
        online.at < offline.at or not online.key,
        "a will numbered after the Status online of its connection",
        f"{offline.at} after {online.at}",
    )
    hello = harness.server.log.wait(mark, "hello", 0.1, lambda each: each.message is not None)
    assert hello is not None
    expect(
        offline.at < hello.at or not hello.key,
        "a will numbered before all else of its connection",
        f"{offline.at}, and the Hello has {hello.at}",
    )


@JOINING.case(
    "Says Status online first, retained, and then Hello, retained, with fields of the right types and values."
)
def hello(harness: RoundHarness) -> None:
    mark = harness.server.log.mark()
    harness.restart() if harness.agent is not None else harness.start()
    online = harness.status(mark, online=True)
    said = harness.server.log.wait(mark, "hello", harness.patient(5.0), lambda each: each.message is not None)
    assert said is not None
    expect(online.place < said.place, "Status before Hello", "Hello first")
    message = said.message
    assert isinstance(message, Hello)
    expect_equal("hello.samples", len(harness.data[1]), message.samples)
    expect(message.memory_bytes > 0, "hello.memory_bytes above 0", message.memory_bytes)
    expect(message.cores > 0, "hello.cores above 0", message.cores)
    expect(bool(message.agent), "hello.agent that names the algorithm", repr(message.agent))
    expect(bool(message.engines), "hello.engines with the engine and its version", message.engines)
    for leaf, topic in (("status", harness.server.mine.status), ("hello", harness.server.mine.hello)):
        kept = harness.server.retained(topic) is not None
        expect(kept, f"{leaf} retained", "a message that the broker did not keep")


@JOINING.case(
    "Signs all that it says with one key of its own, by numbers that grow, and keeps its client id, also over a restart."
)
def signed(harness: RoundHarness) -> None:
    harness.ensure()
    harness.good_round()
    before = _client_ids(harness)
    harness.restart()
    expect_equal("client ids over a restart", before, _client_ids(harness))
    said = [
        each for each in harness.server.log.since(0) if each.leaf != "updates" or each.message is not None
    ]
    wrong = [each for each in said if each.problem]
    expect(
        not wrong, "messages that can be read, and signatures that hold", wrong[0].problem if wrong else ""
    )
    bare = [each.leaf for each in said if not each.key]
    expect(not bare, "every message in an envelope", f"bare {', '.join(sorted(set(bare)))}")
    keys = {each.key.hex()[:12] for each in said}
    expect(len(keys) == 1, "one key, kept in the store", ", ".join(sorted(keys)))
    expect_equal("pairs of messages of a kind whose numbers do not grow", [], _falling(said))


@JOINING.case(
    "Greets again after each connection: Status online, then Hello, and subscribes to its topics again."
)
def greets_again(harness: RoundHarness) -> None:
    harness.ensure()
    begun, mark = time.monotonic(), harness.server.log.mark()
    harness.relay.cut()
    online = harness.status(mark, online=True)
    harness.hello(online.place)
    harness.good_round()
    if harness.relay.reads:
        asked = {each.topic for each in harness.relay.subscriptions(begun)}
        expect(harness.server.mine.tasks in asked, "a new subscription to its tasks", sorted(asked))


@JOINING.case("Says Hello again when a server without room asked it to come later, not before.")
def comes_later(harness: RoundHarness) -> None:
    harness.ensure()
    mark = harness.server.log.mark()
    begun = time.monotonic()
    ack = Ack(
        round=0, nonce="", status="rejected", reason=COME_LATER, text="the kit has no room", later_s=1.5
    )
    harness.server.say(ack)
    harness.hello(mark, 10.0)
    spent = time.monotonic() - begun
    expect(spent >= 1.4, "a Hello after 1.5 s", f"one after {spent:.1f} s")
    harness.good_round()


@JOINING.case("Offers the memory and wishes for the tier that its command line names.", alone=True)
def offers(harness: RoundHarness) -> None:
    mark = harness.server.log.mark()
    harness.start("--memory", "48MiB", "--tier", "weak")
    message = harness.hello(mark)
    expect_equal("hello.memory_bytes", 48 << 20, message.memory_bytes)
    expect_equal("hello.tier", "weak", message.tier)


@JOINING.case(
    "Shows in its Hello that it has the one-time token, without saying it, and follows the server's key in it.",
    alone=True,
)
def token(harness: RoundHarness) -> None:
    given = new_token(bytes.fromhex(harness.server.key))
    place = harness.folder / "token"
    place.write_text(given.text)
    mark = harness.server.log.mark()
    harness.start("--token", f"@{place}", known=False, ready=False)
    message = harness.hello(mark)
    said = harness.server.log.wait(mark, "hello", 0.1, lambda each: each.message is not None)
    assert said is not None
    expect_equal("hello.token", given.name, message.token)
    topic = harness.server.mine.hello
    expect(bool(said.key), "a Hello in an envelope", "a bare one")
    expect(
        proves(given.secret, topic, said.key, message.proof),
        "the proof of docs/protocol.md, Hello",
        message.proof.hex(),
    )
    expect(
        given.secret.hex().encode() not in said.payload,
        "a secret that does not travel",
        "the secret in the Hello",
    )
    harness.good_round()


@JOINING.case("Leaves on SIGTERM: Status offline, retained, then DISCONNECT, and exit code 0.", alone=True)
def leaves(harness: RoundHarness) -> None:
    agent = harness.start()
    begun, mark = time.monotonic(), harness.server.log.mark()
    agent.terminate()
    offline = harness.status(mark, online=False)
    code = agent.wait(harness.patient(20.0))
    expect_equal("exit code", 0, code)
    if harness.relay.reads:
        expect(
            Disconnect() in harness.relay.packets(begun), "DISCONNECT, so that the will is not said", "none"
        )
    time.sleep(0.2)
    again = harness.server.log.since(offline.place + 1, "status")
    expect(not again, "one Status offline, and no will", f"{len(again)} more")
    kept = harness.server.retained(harness.server.mine.status) == offline.payload
    expect(kept, "Status offline, retained", "a message that the broker did not keep")


@JOINING.case(
    "Stops by itself when the run is done (`--until-done`), after Status offline, with exit code 0.",
    alone=True,
)
def done(harness: RoundHarness) -> None:
    agent = harness.start("--until-done")
    play = harness.open()
    received = harness.judged(play)
    mark = harness.server.log.mark()
    harness.server.say(_done(play.announced))
    time.sleep(harness.patient(0.7))
    expect_equal("exit code while its update waits to be acknowledged", None, agent.exit_code)
    harness.answer(received)
    harness.status(mark, online=False)
    expect_equal("exit code", 0, agent.wait(harness.patient(20.0)))


@JOINING.case(
    "Does not stop at the end of a run that it had no part in, as its own may still begin.", alone=True
)
def another_run_is_done(harness: RoundHarness) -> None:
    harness.server.say(_done(harness.announcement(*harness.offer(harness.material()))))
    agent = harness.start("--until-done")
    code = agent.wait(harness.patient(1.5))
    expect(code is None, "an agent that waits", f"exit code {code}")
    harness.run = "another-" + harness.run
    harness.good_round()


@JOINING.case(
    "Does not stop at the end of a run that was over before it was started, though it took part in that run.",
    alone=True,
)
def earlier_run_is_done(harness: RoundHarness) -> None:
    agent = harness.start()
    play = harness.open()
    received = harness.judged(play)
    mark = harness.server.log.mark()
    harness.answer(received)
    agent.terminate()
    harness.status(mark, online=False)
    agent.wait(harness.patient(20.0))
    harness.server.say(_done(play.announced))
    agent = harness.start("--until-done")
    code = agent.wait(harness.patient(1.5))
    expect(code is None, "an agent that waits", f"exit code {code}")


def _done(announced: Round) -> Round:
    return msgspec.structs.replace(announced, state="done", offers={}, units={}, deadline=0.0)


def _client_ids(harness: RoundHarness) -> set[str]:
    """Return the client ids of sessions that stay."""
    connects = [each for each in harness.relay.packets() if isinstance(each, Connect)]
    return {each.client_id for each in connects if not each.clean}


def _connect_of(harness: RoundHarness, since: float) -> Connect:
    found = [each for each in harness.relay.packets(since) if isinstance(each, Connect)]
    if not found:
        raise CaseFailed("a CONNECT of MQTT 3.1.1 or 5", "none that can be read")
    return found[-1]


def _falling(said: list[AgentMessage]) -> list[str]:
    last: dict[str, int] = {}
    wrong = []
    for each in said:
        if isinstance(each.message, Status) and not each.message.online:
            continue  # a will is older than what was said in its connection
        if each.leaf == "updates":
            continue  # in any order
        if each.at <= last.get(each.leaf, -1):
            wrong.append(f"{each.leaf}: {each.at} after {last[each.leaf]}")
        last[each.leaf] = each.at
    return wrong
