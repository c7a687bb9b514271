"""Key files, and how one key follows another."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from edgefl.wire import keys
from edgefl.wire.keys import FOREVER, MOST_SUCCESSIONS, KeyPair, apply_successions, parse_keys, rotate, verify
from tests.support.errors import ConfigError, StoreError, refuses

NOW = 1_000_000.0


def test_a_rotated_key_is_introduced_by_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    old = KeyPair(path)

    new = rotate(path, overlap_s=60, now=NOW)

    assert KeyPair(path).public == new.public != old.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = apply_successions({old.public: FOREVER}, new.successions)
    assert known == {old.public: int(NOW) + 60, new.public: FOREVER}


def test_whoever_was_away_for_several_rotations_follows_them(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = KeyPair(path)
    for _ in range(MOST_SUCCESSIONS):
        last = rotate(path, overlap_s=0, now=NOW)

    assert apply_successions({first.public: FOREVER}, reversed(last.successions))[last.public] == FOREVER
    again = rotate(path, overlap_s=0, now=NOW)
    assert len(again.successions) == MOST_SUCCESSIONS
    assert again.public not in apply_successions({first.public: FOREVER}, again.successions)


def test_a_statement_that_the_old_key_did_not_sign_introduces_nobody(tmp_path: Path) -> None:
    old, thief = KeyPair(tmp_path / "old"), KeyPair(tmp_path / "thief")
    [made] = rotate(tmp_path / "old", overlap_s=60, now=NOW).successions
    known = {old.public: FOREVER}

    for forged in (
        msgspec.structs.replace(made, new=thief.public),
        msgspec.structs.replace(made, until=FOREVER),
        msgspec.structs.replace(made, signature=thief.sign(b"anything")),
    ):
        assert apply_successions(known, [forged]) == known


def test_a_key_that_was_followed_introduces_no_second_one(tmp_path: Path) -> None:
    """Who finds the old key in a drawer must not bring in a key of his own."""
    path, stolen = tmp_path / "key", tmp_path / "stolen"
    old = KeyPair(path)
    stolen.write_text(path.read_text())
    new = rotate(path, overlap_s=FOREVER, now=NOW)
    forged = rotate(stolen, overlap_s=FOREVER, now=NOW)

    known = apply_successions({old.public: FOREVER}, new.successions)

    assert forged.public not in apply_successions(known, forged.successions)


def test_an_interrupted_rotation_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = KeyPair(tmp_path / "key")
    with monkeypatch.context() as patch:
        patch.setattr("edgefl.wire.keys._write_key", lambda *_: (_ for _ in ()).throw(StoreError("full")))
        with pytest.raises(StoreError):
            rotate(tmp_path / "key", overlap_s=0, now=NOW)

    assert KeyPair(tmp_path / "key").successions == ()
    new = rotate(tmp_path / "key", overlap_s=0, now=NOW)
    assert new.public in apply_successions({old.public: FOREVER}, new.successions)


def test_there_is_nothing_to_rotate_where_there_is_no_key(tmp_path: Path) -> None:
    with refuses(ConfigError, path=str(tmp_path / "key")):
        rotate(tmp_path / "key", overlap_s=0, now=NOW)


def test_a_damaged_chain_is_named(tmp_path: Path) -> None:
    KeyPair(tmp_path / "key")
    keys.chain_path(tmp_path / "key").write_text("one two\n")

    with refuses(ConfigError, chain=str(tmp_path / "key.chain")):
        KeyPair(tmp_path / "key")


def test_several_keys_are_given_with_commas(tmp_path: Path) -> None:
    assert parse_keys("") == ()
    assert parse_keys("ab" * 32 + ", " + "cd" * 32) == (b"\xab" * 32, b"\xcd" * 32)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        parse_keys("ab" * 32 + ",")


def test_a_key_that_is_no_point_verifies_nothing() -> None:
    assert not verify(b"\xff" * 32, bytes(64), b"text")
    assert not verify(b"short", bytes(64), b"text")
