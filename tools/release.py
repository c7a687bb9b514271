"""Build the distributions of a release, with the same bits on every machine, and describe them.

``make wheel`` and ``make release`` run it in an environment with the dependency group ``release`` of pyproject.toml. The
exact versions there decide the bits.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "edgefl-tiers"
PAGE = Path("edgefl/web/static")
"""The built page for browsers: the only part of the distributions that is not in Git."""
EXTRAS = ("device", "server")
"""Extras of which the built folder has an environment, and the release a bill of materials."""


class ReleaseError(Exception):
    """The clone or the built distributions are not ready for a release; the text names the reason and what to do."""


# -- Building --


def build(folder: Path) -> list[Path]:
    """Build the source distribution of the commit that is checked out, and the wheel from it, into ``folder``.

    The bits depend on the commit, the built page and the build tools only: sources come from a clone, times from the
    commit, and modes and owners are the same everywhere.

    Returns:
        the wheel and the source distribution.

    Raises:
        ReleaseError: tracked files have changes, or the page was not built.
    """
    if changed := _run("git", "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError(
            f"expected a clone without changes, found some in {changed.split()[1]}; commit them first"
        )
    if not (ROOT / PAGE / "index.html").exists():
        raise ReleaseError(
            f"expected the page for browsers in {PAGE}, found none; build it by `make agents-web`"
        )
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _run("git", "log", "-1", "--format=%ct"))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="edgefl-release-") as temporary:
        place = Path(temporary)
        # A clone has no files of earlier builds, which setuptools would pack again.
        _run("git", "clone", "--quiet", "--shared", ROOT, place / "clone")
        shutil.copytree(ROOT / PAGE, place / "clone" / PAGE)
        _build("--sdist", place / "clone", place / "made", epoch)
        [made] = (place / "made").iterdir()
        sources = folder / made.name
        normalize(made, sources, epoch)
        with tarfile.open(sources) as archive:
            archive.extractall(place / "unpacked", filter="data")
        [unpacked] = (place / "unpacked").iterdir()
        _build("--wheel", unpacked, place / "wheel", epoch)
        [wheel] = (place / "wheel").iterdir()
        return [Path(shutil.copy(wheel, folder)), sources]


def _build(kind: str, source: Path, folder: Path, epoch: int) -> None:
    # setuptools writes the modes of files into a wheel: see the umask of _run.
    _run(
        *(sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder, source),
        environment={"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"},
    )


def normalize(archive: Path, target: Path, epoch: int) -> None:
    """Write the members of a gzipped tar file to ``target`` by name, with the time ``epoch`` and without owners.

    setuptools keeps times, owners and modes of the machine. Here folders and programs get mode 755, other files 644.
    """
    with (
        tarfile.open(archive) as source,
        target.open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in sorted(source.getmembers(), key=lambda each: each.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            made.addfile(plain, source.extractfile(member) if member.isfile() else None)


def build_twice(folder: Path) -> list[Path]:
    """Build into ``folder``, and again elsewhere under another umask; refuse distributions whose bits differ."""
    made = build(folder)
    with tempfile.TemporaryDirectory(prefix="edgefl-again-") as temporary:
        again = Path(temporary) / "elsewhere"
        code = (
            f"import os; os.umask(0o077); from tools.release import build, Path; build(Path({str(again)!r}))"
        )
        _run(sys.executable, "-c", code, environment={"TZ": "Pacific/Auckland"})
        for path in made:
            if digest(path) != digest(again / path.name):
                raise ReleaseError(
                    f"expected the same bits of {path.name} from two builds, found others under umask 077; compare both "
                    "with diffoscope"
                )
    _run(sys.executable, "-m", "twine", "check", "--strict", *made)
    return made


# -- Describing --


def describe(folder: Path, release: Path) -> None:
    """Copy the distributions of ``folder`` to ``release``, and write bills of materials and ``SHA256SUMS`` beside them.

    Args:
        folder: distributions, and an environment for each of ``EXTRAS`` in which the wheel is installed.
        release: folder to create; an older one is replaced.

    Raises:
        ReleaseError: the tag of the distributions is not the version of the sources.
    """
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ReleaseError(f"expected one wheel in {folder}, found {len(wheels)}; build it by `make wheel`")
    version = wheels[0].name.split("-")[1]
    check_version(version)
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir(parents=True)
    for path in (wheels[0], *folder.glob("*.tar.gz")):
        shutil.copy(path, release)
    for extra in EXTRAS:
        name = f"{NAME.replace('-', '_')}-{version}-{extra}.cdx.json"
        write_sbom(release / name, wheels[0], folder / extra)
    files = sorted(release.iterdir())
    (release / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))


def check_version(version: str) -> None:
    """Refuse a tagged version that differs from the default version in pyproject.toml, which sources and agents have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    default = project["tool"]["versioningit"]["default-version"]
    if ".dev" not in version and version != default:
        raise ReleaseError(
            f"expected the tag v{default}, as default-version in pyproject.toml has it, found v{version}; "
            "correct default-version, commit, and tag that commit"
        )


def write_sbom(path: Path, wheel: Path, environment: Path) -> None:
    """Write a bill of materials in CycloneDX: the wheel, its JavaScript packages, and all that its environment needs.

    It has no serial number and no time, so that it is the same for the same packages. Installers that are in the
    environment, but are not required, are left out.

    Raises:
        ReleaseError: the file does not fit CycloneDX's schema.
    """
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    program = Path(sys.executable).with_name("cyclonedx-py")
    found = json.loads(_run(program, "environment", "--output-reproducible", environment / "bin" / "python"))
    [root] = (each for each in found["components"] if each["name"] == NAME)
    required = {each["ref"]: each.get("dependsOn", []) for each in found["dependencies"]}
    reached, waiting = {root["bom-ref"]}, [root["bom-ref"]]
    while waiting:
        new = set(required[waiting.pop()]) - reached
        reached |= new
        waiting += new
    del root["externalReferences"]  # the folder from which it was installed
    root["purl"] = f"pkg:pypi/{NAME}@{root['version']}"
    root["hashes"] = [{"alg": "SHA-256", "content": digest(wheel)}]
    root["components"] = _javascript()
    document = {
        **found,
        "metadata": {**found["metadata"], "component": root},
        "components": [
            each for each in found["components"] if each is not root and each["bom-ref"] in reached
        ],
        "dependencies": [each for each in found["dependencies"] if each["ref"] in reached],
    }
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    schema = SchemaVersion.from_version(document["specVersion"])
    if (error := JsonStrictValidator(schema).validate_str(path.read_text())) is not None:
        raise ReleaseError(
            f"expected {path.name} in CycloneDX {document['specVersion']}, found {error}; report it"
        )


def _javascript() -> list[dict[str, Any]]:
    """Return the components that the wheel contains: npm packages of the page for browsers, and uPlot of the dashboard."""
    locked = json.loads((ROOT / "agents/web/package-lock.json").read_text())["packages"]
    packages = {
        (place.rpartition("node_modules/")[2], entry["version"], entry["license"])
        for place, entry in locked.items()
        if place and not entry.get("dev")
    }
    head = (ROOT / "server/edgefl_server/dashboard/static/uPlot.iife.min.js").read_text()[:200]
    [plot] = re.findall(r"uPlot \(v([\d.]+)\)", head)
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "bom-ref": f"{name}@{version}",
            "purl": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "licenses": [{"expression": license}],
        }
        for name, version, license in sorted({*packages, ("uplot", plot, "MIT")})
    ]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(*command: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in the clone under umask 022, and return its output; raise ReleaseError if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        umask=0o022,
        check=False,
    )
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise ReleaseError(f"{last}\n{' '.join(map(str, command[:4]))} ended with {done.returncode}")
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="wheel and source distribution, built twice and compared")
    one.add_argument("folder", type=Path)
    one = commands.add_parser("describe", help="copy them, with bills of materials and SHA256SUMS")
    one.add_argument("folder", type=Path)
    one.add_argument("release", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "build":
            for path in build_twice(given.folder):
                print(f"{digest(path)}  {path}, the same from two builds")
        else:
            describe(given.folder, given.release)
            print((given.release / "SHA256SUMS").read_text(), end="")
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
