"""Vectors of signatures: signed texts, and invalid signatures."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgefl.wire import enrolment
from edgefl.wire.bundle.archive import signed_text as bundle_text
from edgefl.wire.mqtt.envelope import Envelope, signed_text
from edgefl.wire.mqtt.messages import (
    Ack,
    Decline,
    Hello,
    Message,
    Offer,
    ProfileAnswer,
    ProfileRequest,
    Progress,
    Round,
    Status,
    Task,
    UpdateChunk,
    encode,
)
from edgefl.wire.mqtt.topics import Topics

_SERVER, _DEVICE, _NEXT = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
_AT = 1 << 40
_MINE = Topics("demo").device("phone-7")


def signature_vectors() -> dict[str, list[dict[str, Any]]]:
    """Return lists of cases by topic; all bytes are hexadecimal."""
    return {
        "keys": [{"private": key.hex(), "public": _public(key).hex()} for key in (_SERVER, _DEVICE, _NEXT)],
        "envelopes": [_envelope(topic, message) for topic, message in _messages()],
        "wrong": _wrong(),
        "successions": [_succession()],
        "enrolments": [_enrolment()],
        "bundles": [_bundle()],
    }


def _messages() -> list[tuple[str, Message]]:
    topics, nonce = Topics("demo"), "0011aabb"
    empty: dict[str, Offer] = {}
    return [
        (
            topics.current_round,
            Round(
                run="r",
                round=1,
                state="closed",
                model_version="0",
                offers=empty,
                units={},
                hyper={},
                base=0,
                deadline=0.0,
            ),
        ),
        (_MINE.tasks, Task(run="r", round=1, tier="weak", seed=1, nonce=nonce)),
        (_MINE.acks, Ack(round=1, nonce=nonce, status="accepted")),
        (_MINE.profile_requests, ProfileRequest(nonce="0011aabbccddeeff", bundles={}, within_s=1.0)),
        (_MINE.status, Status(online=True)),
        (_MINE.hello, Hello(agent="a", memory_bytes=1, cores=1, samples=1, engines={})),
        (
            _MINE.progress,
            Progress(
                round=1,
                tier="t",
                stage="train",
                step=1,
                steps=2,
                loss=0.5,
                step_ms=1.0,
                peak_bytes=1,
                down_bytes=1,
                up_bytes=1,
            ),
        ),
        (
            _MINE.update(1, 0),
            UpdateChunk(nonce=nonce, sha256="ab" * 32, index=0, count=1, size=2, data=b"\x01\x02"),
        ),
        (_MINE.declines, Decline(round=1, nonce=nonce, reason="policy")),
        (_MINE.profiles, ProfileAnswer(nonce="0011aabbccddeeff", state="taken")),
    ]


def _envelope(topic: str, message: Message, key: bytes = _DEVICE) -> dict[str, Any]:
    text = signed_text(type(message), topic, _AT, encode(message))
    made = Envelope(v=2, key=_public(key), at=_AT, signature=_sign(key, text), body=encode(message))
    return {
        "message": type(message).__name__,
        "topic": topic,
        "at": _AT,
        "private": key.hex(),
        "body": encode(message).hex(),
        "signed_text": text.hex(),
        "signature": made.signature.hex(),
        "envelope": msgspec.msgpack.encode(made).hex(),
    }


def _wrong() -> list[dict[str, Any]]:
    task = Task(run="r", round=1, tier="weak", seed=1, nonce="0011aabb")
    whole = msgspec.msgpack.decode(bytes.fromhex(_envelope(_MINE.tasks, task)["envelope"]), type=Envelope)
    other = msgspec.structs.replace(whole, body=encode(msgspec.structs.replace(task, seed=2)))
    for_ack = _sign(_DEVICE, signed_text(Ack, _MINE.tasks, _AT, encode(task)))
    cases = {
        "another body": (_MINE.tasks, other),
        "another number": (_MINE.tasks, msgspec.structs.replace(whole, at=_AT + 1)),
        "another topic": (Topics("demo").device("phone-8").tasks, whole),
        "another federation": (Topics("other").device("phone-7").tasks, whole),
        "another key": (_MINE.tasks, msgspec.structs.replace(whole, key=_public(_NEXT))),
        "another kind of message": (_MINE.tasks, msgspec.structs.replace(whole, signature=for_ack)),
    }
    return [
        {"why": why, "message": "Task", "topic": topic, "envelope": msgspec.msgpack.encode(made).hex()}
        for why, (topic, made) in cases.items()
    ]


def _succession() -> dict[str, Any]:
    old, new, until = _public(_SERVER), _public(_NEXT), 1_800_000_000
    text = f"edgefl/succession/1\n{old.hex()}\n{new.hex()}\n{until}\n".encode()
    signature = _sign(_SERVER, text).hex()
    return {
        "old": old.hex(),
        "new": new.hex(),
        "until": until,
        "signed_text": text.hex(),
        "signature": signature,
    }


def _enrolment() -> dict[str, Any]:
    token = enrolment.Token("0123456789abcdef", bytes(range(96, 128)), _public(_SERVER))
    proof = enrolment.prove(token.secret, _MINE.hello, _public(_DEVICE))
    return {"token": token.text, "topic": _MINE.hello, "public": _public(_DEVICE).hex(), "proof": proof.hex()}


def _bundle() -> dict[str, Any]:
    digest = hashlib.sha256(b"a manifest").hexdigest()
    text = bundle_text(digest)
    return {
        "sha256": digest,
        "private": _SERVER.hex(),
        "signed_text": text.hex(),
        "signature": _sign(_SERVER, text).hex(),
    }


def _public(private: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _sign(private: bytes, text: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).sign(text)
