"""The folder of compiled bundles: what is found there, what is made again, what goes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edgefl.system.files import PARTIAL
from edgefl.wire.bundle.archive import BundleArchive, encode_bundle
from edgefl_export.compiler import cache as module
from edgefl_export.compiler.cache import BundleCache, cache_summary, short_path
from tests.device_runtime import tiny


@pytest.fixture(scope="module")
def bundle() -> BundleArchive:
    return tiny.make_bundle(prefix=())


@pytest.fixture
def cache(tmp_path: Path) -> BundleCache:
    return BundleCache(tmp_path / "kept")


def named(bundle: BundleArchive, tier: str) -> BundleArchive:
    return BundleArchive(msgspec.structs.replace(bundle.manifest, tier=tier), bundle.blobs)


def test_find_returns_the_bundle_that_was_kept(cache: BundleCache, bundle: BundleArchive) -> None:
    assert cache.find("a" * 64) is None
    cache.keep("a" * 64, bundle)
    assert cache.find("a" * 64) == bundle and cache.find("b" * 64) is None


@pytest.mark.parametrize(
    "damage", [lambda data: data[:100], lambda data: b"", lambda data: data[:-40] + bytes(40)]
)
def test_a_damaged_file_counts_as_none(cache: BundleCache, bundle: BundleArchive, damage: object) -> None:
    cache.keep("a", bundle)
    [path] = cache.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]

    assert [entry.manifest for entry in cache.entries()] == [None]
    assert cache.find("a") is None
    cache.keep("a", bundle)
    assert cache.find("a") == bundle


def test_what_was_longest_not_used_goes_first(cache: BundleCache, bundle: BundleArchive) -> None:
    room = int(2.5 * len(encode_bundle(bundle)))
    small = replace(cache, limit=room)
    for age, tier in enumerate(("old", "older")):
        small.keep(tier, named(bundle, tier))
        os.utime(small.folder / f"{tier}.efl", (1000.0 - age, 1000.0 - age))
    assert small.find("older") is not None, "and counts as used from now on"

    small.keep("new", bundle)

    assert {path.stem for path in small.folder.iterdir()} == {"older", "new"}
    assert small.entries()[0].path.stem == "new"
    replace(cache, limit=0).keep("large", bundle)
    assert [path.stem for path in small.folder.iterdir()] == ["large"], "one bundle stays, whatever its size"


def test_clearing_removes_bundles_and_nothing_else(cache: BundleCache, bundle: BundleArchive) -> None:
    assert cache.clear() == cache.nbytes == 0 and cache.entries() == []
    cache.keep("a", bundle)
    (cache.folder / "mine.txt").write_text("left alone")
    assert cache.nbytes == len(encode_bundle(bundle))
    assert cache.clear() == 1
    assert [path.name for path in cache.folder.iterdir()] == ["mine.txt"]


def test_several_writers_at_once_leave_one_whole_bundle(cache: BundleCache, bundle: BundleArchive) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.keep("a", bundle), range(40)))
    assert cache.find("a") == bundle
    assert [path.name for path in cache.folder.iterdir()] == ["a.efl"]


def test_what_a_killed_process_left_is_removed_in_time(
    cache: BundleCache, bundle: BundleArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.folder.mkdir()
    left, fresh = (cache.folder / f"{name}{PARTIAL}" for name in ("left", "fresh"))
    for path in (left, fresh):
        path.write_bytes(b"half")
    os.utime(left, (1000.0, 1000.0))
    cache.keep("a", bundle)
    assert not left.exists() and fresh.exists()


def test_the_folder_is_the_users_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EDGEFL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert BundleCache.of_user().folder == tmp_path / ".cache" / "edgefl" / "bundles"
    assert short_path(BundleCache.of_user().folder) == "~/.cache/edgefl/bundles"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert BundleCache.of_user().folder == tmp_path / "x" / "edgefl" / "bundles"
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path / "own"))
    assert BundleCache.of_user().folder == tmp_path / "own"


def test_people_are_told_counts_place_and_size(tmp_path: Path) -> None:
    about = {"folder": tmp_path, "nbytes": 12_897_485}
    assert cache_summary(compiled=0, reused=3, **about) == f"bundles: 3 from the cache ({tmp_path}, 12.3 MiB)"  # type: ignore[arg-type]
    assert "2 compiled" in cache_summary(compiled=2, reused=0, **about)  # type: ignore[arg-type]


def test_the_cache_is_read_without_torch() -> None:
    script = f"import sys, {module.__name__}; print('torch' in sys.modules, 'onnx' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "False"]
