"""A disk that a power cut can catch: what is on it for certain, and what may be.

The promises are POSIX's and no more: the bytes of a file are on disk once it was synced, its name once its folder was. Of
what came since, a cut keeps any part, in any order; of a single write it may keep the beginning.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.power.recorder import Op

Keep = Callable[[str], bool]
"""Whether a cut keeps one operation that nobody waited for, ``data`` or ``name``."""

_RANDOM = 2


@dataclass
class _File:
    """``synced`` is on disk; ``waiting`` are writes (offset, bytes) and truncations (size, None) since."""

    synced: bytes = b""
    waiting: list[tuple[int, bytes | None]] = field(default_factory=list)


@dataclass
class Disk:
    """Files and folders below ``root``, which was there before, after some operations."""

    root: Path
    names: dict[str, _File | None] = field(default_factory=dict)
    """As processes see it; None is a folder."""
    synced: dict[str, _File | None] = field(default_factory=dict)
    waiting: list[tuple[str, _File | None, bool]] = field(default_factory=list)
    """Names (path, file, whether it is there) that were changed since their folder was synced."""
    loaded: frozenset[str] = frozenset()
    """Paths that were there before."""

    def load(self, ops: Sequence[Op]) -> None:
        """Read the files and folders below ``root`` that ``ops`` name and that were there before them."""
        named = {path for op in ops for path in (op.path, op.target) if path}
        named |= {
            str(folder) for path in named for folder in Path(path).parents if self.root in folder.parents
        }
        for path in sorted(named):
            place = Path(path)
            if place.is_dir():
                self.names[path] = None
            elif place.is_file():
                self.names[path] = _File(place.read_bytes())
        self.synced = dict(self.names)
        self.loaded = frozenset(self.names)

    def apply(self, op: Op) -> None:
        match op.kind:
            case "create" if op.path not in self.names:
                self._name(op.path, _File())
            case "mkdir":
                self._name(op.path, None)
            case "write":
                self._file(op.path).waiting.append((op.offset, op.data))
            case "truncate":
                self._file(op.path).waiting.append((op.offset, None))
            case "sync":
                self._sync(op.path)
            case "rename":
                moved = self._file(op.path)
                self._name(op.path, moved, there=False)
                self._name(op.target, moved)
            case "link":
                self._name(op.target, self._file(op.path))
            case "unlink" if op.path in self.names:
                self._name(op.path, self.names[op.path], there=False)

    def _file(self, path: str) -> _File:
        file = self.names.get(path)
        assert file is not None, f"{path} was not created while it was watched"
        return file

    def _name(self, path: str, file: _File | None, *, there: bool = True) -> None:
        if there:
            self.names[path] = file
        else:
            del self.names[path]
        self.waiting.append((path, file, there))

    def _sync(self, path: str) -> None:
        file = self.names.get(path)
        if file is not None:
            file.synced, file.waiting = _written(file, lambda _: True), []
            return
        kept = []
        for change in self.waiting:
            if str(Path(change[0]).parent) == path:
                _changed(self.synced, change)
            else:
                kept.append(change)
        self.waiting = kept

    def after_a_cut(self, keep: Keep) -> dict[str, bytes | None]:
        """What is found when power is back: bytes by path, None for a folder."""
        names = dict(self.synced)
        for change in self.waiting:
            if keep("name"):
                _changed(names, change)
        found = {path: None if file is None else _written(file, keep) for path, file in names.items()}
        return {path: data for path, data in found.items() if _reachable(path, names, self.root)}


def _changed(names: dict[str, _File | None], change: tuple[str, _File | None, bool]) -> None:
    path, file, there = change
    if there:
        names[path] = file
    else:
        names.pop(path, None)


def _written(file: _File, keep: Keep) -> bytes:
    data = bytearray(file.synced)
    for offset, piece in file.waiting:
        if not keep("data"):
            continue
        if piece is None:
            del data[offset:]
            data.extend(bytes(offset - len(data)))
        else:
            data.extend(bytes(max(0, offset - len(data))))
            data[offset : offset + len(piece)] = piece
    return bytes(data)


def _reachable(path: str, names: dict[str, _File | None], root: Path) -> bool:
    """Whether the folders below ``root`` that lead to it are there."""
    between = itertools.takewhile(lambda parent: parent != root, Path(path).parents)
    return all(names.get(str(parent), _File()) is None for parent in between)


def crash_states(
    ops: Sequence[Op], root: Path, *, since: int, seed: int
) -> Iterator[tuple[int, str, dict[str, bytes | None]]]:
    """(operations done, what the cut kept, what is found) for cuts before each operation from ``since`` on that makes
    something last or tells somebody, and at the end.

    Of what nobody waited for it keeps nothing, all, the names alone, the bytes alone, and two random parts.
    """
    rng = random.Random(seed)
    choices: list[tuple[str, Keep]] = [
        ("nothing", lambda _: False),
        ("all", lambda _: True),
        ("names", lambda what: what == "name"),
        ("bytes", lambda what: what == "data"),
    ]
    choices += [("a part", lambda _: rng.random() < 0.5)] * _RANDOM
    disk = Disk(root)
    for done, op in enumerate(itertools.chain(ops, [Op("mark")])):
        if done >= since and op.kind in ("sync", "rename", "unlink", "mark", "mkdir"):
            seen = []
            for name, keep in choices:
                state = disk.after_a_cut(keep)
                if state not in seen:
                    seen.append(state)
                    yield done, name, state
        disk.apply(op)


def lay_out(state: dict[str, bytes | None], root: Path, folder: Path) -> None:
    """Write a state that was recorded below ``root`` into ``folder``."""
    for path, data in sorted(state.items()):
        place = folder / Path(path).relative_to(root)
        if data is None:
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.write_bytes(data)
