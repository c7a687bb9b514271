"""Where the binding to ExecuTorch comes from: the package, the user's cache, a compiler, or a clear word on what lacks."""

from __future__ import annotations

import json
import platform
import sys
import threading
from pathlib import Path

import pytest

from edgefl.cli import app
from edgefl_device.engine import ENGINES, open_engine
from edgefl_device.engine.executorch import build
from edgefl_device.engine.executorch.build import ExecuTorchWheel
from edgefl_device.engine.executorch.program import load
from tests.cli.runner import runner
from tests.support.errors import ConfigError, refuses

WHEEL = build.find_wheel()

pytestmark = pytest.mark.needs("c++")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package without a binding."""
    source = tmp_path / "package" / "native.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgefl"


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_it_is_compiled_once_and_says_so(cache: Path) -> None:
    said: list[str] = []

    first = build.binding(WHEEL, said.append)
    again = build.binding(WHEEL, said.append)

    assert first == again
    assert first.parent == cache
    assert said == ["building the ExecuTorch binding, once"]
    assert [file.name for file in cache.iterdir()] == [first.name]


def test_one_that_anybody_could_have_written_is_compiled_again(cache: Path) -> None:
    first = build.binding(WHEEL, lambda _: None)
    whole = first.read_bytes()
    first.write_bytes(b"somebody else's")
    first.chmod(0o666)
    words: list[str] = []

    assert build.binding(WHEEL, words.append).read_bytes() == whole and words

    cache.chmod(0o777)
    words.clear()
    build.binding(WHEEL, words.append)
    assert words


def test_a_packaged_one_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = build.build_engine()[0]
    no_compiler(monkeypatch, tmp_path)

    assert build.binding(WHEEL, pytest.fail) == made


def test_a_damaged_one_in_the_cache_is_compiled_again_and_said_so(cache: Path) -> None:
    made = build.binding(WHEEL, str)
    made.write_bytes(b"gone")
    said: list[str] = []

    calls = load(WHEEL, said.append)

    assert calls.one() == 1
    assert len(said) == 1 and "building it again" in said[0] and made.name in said[0]


def test_a_damaged_one_says_what_lacks(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.binding(WHEEL, str).write_bytes(b"gone")
    no_compiler(monkeypatch, tmp_path)

    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        load(WHEEL, str)


def test_other_source_and_another_release_have_bindings_of_their_own(tmp_path: Path) -> None:
    first = build.build(WHEEL, tmp_path)
    build._SOURCE.write_text('extern "C" int two() { return 2; }\n')

    names = {first, build.build(WHEEL, tmp_path), build.build(ExecuTorchWheel(WHEEL.root, "1.6.0"), tmp_path)}

    assert len(names) == 3


def test_devices_that_build_at_once_all_find_a_whole_one(cache: Path) -> None:
    found: list[bytes] = []
    workers = [
        threading.Thread(target=lambda: found.append(build.build(WHEEL, cache).read_bytes()[:4]))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert found == [b"\x7fELF" if sys.platform == "linux" else found[0]] * 3
    assert len(list(cache.iterdir())) == 1


def test_of_devices_at_once_one_builds(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counted = tmp_path / "counting-c++"
    counted.write_text(f'#!/bin/sh\necho again >>{tmp_path / "runs"}\nexec c++ "$@"\n')
    counted.chmod(0o755)
    monkeypatch.setenv("CXX", str(counted))
    workers = [threading.Thread(target=build.binding, args=(WHEEL, str)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert (tmp_path / "runs").read_text() == "again\n"
    assert len(list(cache.iterdir())) == 1


def test_a_broken_compiler_is_no_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "odd-c++").write_bytes(b"\x7fELF, and nothing more")
    (tmp_path / "odd-c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "odd-c++"))

    with pytest.raises(
        ConfigError, match=r"odd-c\+\+ cannot compile the ExecuTorch binding: it cannot be run"
    ):
        build.binding(WHEEL, str)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)

    with pytest.raises(ConfigError, match=r"no folder for the ExecuTorch binding: .* XDG_CACHE_HOME"):
        build.binding(WHEEL, str)


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_compiler(monkeypatch, tmp_path)

    with pytest.raises(
        ConfigError, match=r"install a C[+][+] compiler .* build-engine --out .* `engine` onnx"
    ):
        build.binding(WHEEL, lambda _: None)


def test_a_compiler_that_is_named_and_not_there_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")

    with pytest.raises(ConfigError, match="there is no no-such-compiler -m64"):
        build.binding(WHEEL, lambda _: None)


def test_what_does_not_compile_is_told_by_its_first_error(cache: Path) -> None:
    build._SOURCE.write_text("int main( {\n")

    with pytest.raises(ConfigError, match=r"cannot compile the ExecuTorch binding: .*native.cpp:1.* error"):
        build.binding(WHEEL, lambda _: None)

    assert list(cache.iterdir()) == []


def test_a_cache_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")

    with refuses(ConfigError, folder=str(tmp_path / "cache" / "edgefl")):
        build.binding(WHEEL, lambda _: None)


def test_a_package_without_its_libraries_says_to_install_it_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no libexecutorch_kernels_optimized.*pip install"):
        ExecuTorchWheel(tmp_path, "1.5.1").library("executorch_kernels_optimized")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is only called like it is none."""
    (tmp_path / "executorch").mkdir()
    monkeypatch.delitem(sys.modules, "executorch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    with pytest.raises(
        ConfigError, match=r"not installed: install it by `pip install 'edgefl-tiers\[executorch\]'`"
    ):
        build.find_wheel()


def test_without_onnxruntime_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "edgefl_device.engine.onnx", raising=False)

    with refuses(ConfigError, package="onnxruntime"):
        open_engine("onnx")


@pytest.mark.parametrize(
    ("machine", "libc", "found"),
    [
        ("armv7l", ("glibc", "2.36"), "found armv7l with 64 bits and glibc 2.36"),
        ("aarch64", ("", ""), "found aarch64 with 64 bits and no glibc"),
        ("x86_64", ("glibc", "2.27"), "found x86_64 with 64 bits and glibc 2.27"),
    ],
    ids=["32-bit ARM", "musl", "old glibc"],
)
def test_a_platform_without_wheels_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: str, libc: tuple[str, str], found: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "edgefl_device.engine.onnx", raising=False)
    monkeypatch.delitem(sys.modules, "executorch", raising=False)
    monkeypatch.setattr(sys, "path", [])

    for refused in (lambda: open_engine("onnx"), build.find_wheel):
        with pytest.raises(ConfigError, match=f"expected Linux with 64 bits .* 2.28 or newer, {found}"):
            refused()


def test_an_engine_that_does_not_exist_is_refused_by_name() -> None:
    with refuses(ConfigError, engine="tflite"):
        open_engine("tflite")


@pytest.mark.parametrize("threads", [-1, 0, 100_000])
@pytest.mark.parametrize("name", ENGINES)
def test_threads_that_no_device_has_are_refused(name: str, threads: int) -> None:
    with refuses(ConfigError, threads=threads):
        open_engine(name, threads)


def test_the_command_builds_into_a_folder(tmp_path: Path) -> None:
    ran = runner().invoke(app, ["device", "build-engine", "--out", str(tmp_path / "card"), "--json"])

    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert Path(told["file"]).parent == tmp_path / "card"
    assert Path(told["file"]).stat().st_size > 0
    assert told["executorch"] == WHEEL.version
