"""``python -m tests.agents.deb.power_cuts OLD.deb NEW.deb --cuts 20``: power cuts during an upgrade of the package.

dpkg's writes are recorded while it upgrades the package in a root of Debian. Each cut leaves the root as it was before,
with the first operations done and all that was not synced by then dropped. After ``dpkg --configure -a`` the agent has to
start by its unit. dpkg does not configure a package that it was unpacking: it has to take the same package once more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.agents.deb import debian_root
from tests.agents.deb.debian_root import Service, run_in, within
from tests.power.disk import Disk
from tests.power.recorder import Op, record_command

IGNORED = ("proc", "dev", "tmp", "run", "var/log")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = []
    if debian_root.is_emulated():
        debian_root.emulate()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-cuts-"))).resolve()
        with debian_root.over(debian_root.base_root(), folder / "old") as root:
            _install_for_cuts(root, options.old)
            shutil.copy(options.new, root / "tmp" / "new.deb")
        old = folder / "old" / "upper"
        base = debian_root.base_root()
        with debian_root.over(_layers(old, base), folder / "new") as root:
            command = ["chroot", root, "dpkg", "-i", "/tmp/new.deb"]
            ops = record_command([str(word) for word in command], root, folder / "log", changed_root=root)
        with debian_root.over(_layers(old, base), folder / "disk") as before:
            ops = [
                _moved(op, folder / "new" / "root", before)
                for op in ops
                if _is_kept(op, folder / "new" / "root")
            ]
            for number, done in enumerate(_prefixes(ops, options.cuts)):
                result = _cut(ops, done, before, _layers(old, base), folder / f"cut-{number}")
                results.append(result)
                if not options.json:
                    print(
                        f"cut {number + 1} of {options.cuts}, after {done} of {len(ops)} operations: {result}"
                    )
    if options.json:
        print(json.dumps({"operations": len(ops), "cuts": results}))
    return 0


def _layers(upper: Path, base: Path) -> str:
    return f"{upper}:{base}"


def _install_for_cuts(root: Path, package: Path) -> None:
    debian_root.install(root, package)
    debian_root.put_for_agent(root, "data.npz", _tiny_data())
    debian_root.configure(
        root, id="pi-1", broker="127.0.0.1:1", data="/var/lib/edgefl-agent/data.npz", json=True
    )


def _tiny_data() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros((8, 4), np.float32), y=np.zeros(8, np.int64))
    return file.getvalue()


def _is_kept(op: Op, root: Path) -> bool:
    return not op.path.startswith(tuple(f"{root}/{name}" for name in IGNORED)) and op.kind != "mark"


def _moved(op: Op, root: Path, to: Path) -> Op:
    """Return the operation as one below another root."""

    def place(path: str) -> str:
        if not path:
            return ""
        named = to / Path(path).relative_to(root)
        return str(named.parent.resolve() / named.name)  # /lib is a link

    return Op(op.kind, place(op.path), place(op.target), op.offset, op.data)


def _prefixes(ops: Sequence[Op], cuts: int) -> list[int]:
    """Return numbers of operations, evenly over those that make something last."""
    lasting = [at for at, op in enumerate(ops) if op.kind in ("sync", "rename", "unlink", "mkdir")]
    return [lasting[place * (len(lasting) - 1) // max(1, cuts - 1)] + place % 2 for place in range(cuts)]


def _cut(ops: Sequence[Op], done: int, before: Path, layers: str, folder: Path) -> str:
    """Return the package's status after a cut and after ``dpkg --configure -a``. AssertionError if the agent does not
    start."""
    disk = Disk(before)
    disk.load(ops)
    for op in ops[:done]:
        disk.apply(op)
    state = disk.after_a_cut(lambda _: False)
    with debian_root.over(layers, folder) as root:
        for path in sorted(disk.loaded - state.keys(), reverse=True):
            place = root / Path(path).relative_to(before)
            place.rmdir() if place.is_dir() else place.unlink()
        for path, data in sorted(state.items()):
            place = root / Path(path).relative_to(before)
            if data is None:
                place.mkdir(exist_ok=True)
            elif not place.exists() or place.read_bytes() != data:
                _write(place, data)
        status = _status(root)
        ended = run_in(root, "dpkg", "--configure", "-a")
        after = _status(root)
        _start(root)
        # dpkg leaves a package that it was unpacking for its next installation.
        assert ended.returncode == 0 or "reinstreq" in after, ended.stderr
        if "reinstreq" in after:
            within(root, "dpkg", "-i", "/tmp/new.deb")
            after = f"{after}, then {_status(root)}"
            _start(root)
    shutil.rmtree(folder)
    return f"{status}, then {after}"


def _start(root: Path) -> None:
    """Start the agent by its unit, and stop it."""
    agent = Service(root)
    agent.wait_note("READY=1")
    assert agent.stop() == 0


def _write(place: Path, data: bytes) -> None:
    """Write a file with the rights that dpkg gives it: those of the file that it replaces, or of a program."""
    like = place.with_name(place.name.removesuffix(".dpkg-new").removesuffix(".dpkg-tmp"))
    mode = like.stat().st_mode & 0o7777 if like.exists() else 0o755
    place.write_bytes(data)
    place.chmod(mode)


def _status(root: Path) -> str:
    shown = within(root, "dpkg-query", "-W", "-f", "${Version} ${Status}", "edgefl-agent").stdout
    return " ".join(shown.split())


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("expected root, which makes and enters roots of Debian; found another user: run with sudo")
    sys.exit(main(sys.argv[1:]))
