"""Bytes of updates in a bucket that several workers write to, and that answers 503 for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import RoundClosed, UpdateAccepted, Warned
from edgefl_server.shards.messages import worker_of
from edgefl_server.storage.update_storage import UpdateFiles, place_of, store_at
from edgefl_server.workers.process import ProcessLauncher
from tests.conftest import Mosquitto
from tests.server.fleet import ScriptedDevice
from tests.server.shards.buckets import Bucket
from tests.server.shards.fleets import NAMES, KnownWorkers, model_of, started
from tests.support.errors import StoreError, refuses

URL = "s3://bucket/run"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    fsspec = pytest.importorskip("fsspec")
    s3fs = pytest.importorskip("s3fs")
    made = Bucket()
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", made.endpoint)  # for the workers; this process has read it
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": made.endpoint})
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "here",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    s3fs.S3FileSystem.clear_instance_cache()
    made.close()


def test_appended_updates_are_readable_elsewhere_until_the_round_ends(bucket: Bucket) -> None:
    first, second = store_at(URL, "one"), store_at(URL, "two")
    places = [*first.append(3, [b"aa", b"", b"bbb"]), *second.append(3, [b"c"])]

    assert [first.read(place) for place in places] == [b"aa", b"", b"bbb", b"c"]
    assert len(set(bucket.written)) == 2 and all(key.startswith("run/round-") for key in bucket.written)
    with refuses(StoreError, url="s3://bucket/run"):
        first.read(replace(places[0], file="none"))
    second.drop()
    assert not bucket.objects


def test_a_server_that_is_started_again_writes_over_nothing(bucket: Bucket) -> None:
    before, after = store_at(URL), store_at(URL)
    places = [*before.append(3, [b"accepted"]), *after.append(3, [b"later"])]

    assert [after.read(place) for place in places] == [b"accepted", b"later"]
    assert sorted(places, key=lambda place: place.file) == places  # the order in which they came


@pytest.mark.slow
def test_a_bucket_that_answers_503_is_waited_for(
    bucket: Bucket, mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path
) -> None:
    bucket.refusals = 12
    known = KnownWorkers(launcher=ProcessLauncher())  # whose environment is this process's as it is now
    devices = [
        ScriptedDevice(mosquitto.address, name, each, limits)
        for name in (federation, f"{federation}-calm")
        for each in NAMES
    ]
    try:
        calm = started(f"{federation}-calm", mosquitto.address, tmp_path / "calm", limits)
        server = started(
            federation, mosquitto.address, tmp_path / "out", limits, workers=2, launcher=known, updates=URL
        )
        trouble = server.wait_for(Warned, lambda event: URL in event.text)
        server.wait_for(UpdateAccepted, lambda event: worker_of(event.device, 2) == 0)
        os.kill(known.pid(0), signal.SIGKILL)  # the next one reads what the bucket has
        closed = server.wait_for(RoundClosed)
        server.join()
        calm.join()
    finally:
        for each in devices:
            each.stop()

    assert "ServiceUnavailable" in trouble.text or "reduce your request rate" in trouble.text, trouble.text
    assert bucket.refused == 12 and closed.reports == len(NAMES)
    # The task, its worker in trouble and well again, and for half of them another worker: not one for each refusal.
    asked = [device.tasks.qsize() for device in devices if device.topics == Topics(federation)]
    assert max(asked) <= 3, asked
    assert model_of(tmp_path / "out") == model_of(tmp_path / "calm")
    assert not bucket.objects


def test_federations_that_share_a_place_leave_each_other_what_is_theirs(tmp_path: Path) -> None:
    one, other = (
        store_at(place_of(str(tmp_path / "shared"), federation, tmp_path)) for federation in ("one", "other")
    )
    [place] = one.append(1, [b"accepted"])
    other.append(1, [b"of a round that is over"])

    other.drop()

    assert one.read(place) == b"accepted"
    assert place_of("", "one", tmp_path) == str(tmp_path / "updates")
    assert place_of("s3://bucket/run/", "one", tmp_path) == "s3://bucket/run/one"


def test_a_place_is_a_folder_or_what_fsspec_reaches(tmp_path: Path) -> None:
    assert isinstance(store_at(str(tmp_path)), UpdateFiles)
    assert isinstance(store_at(f"file://{tmp_path}"), UpdateFiles)
    with refuses(StoreError, url="nowhere://x"):
        store_at("nowhere://x")
