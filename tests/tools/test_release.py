"""Releases: versions from tags, and archives without traces of the machine."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import tarfile
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from versioningit import get_version

from edgefl.system.distribution import version
from tools.release import ReleaseError, check_version, normalize

ROOT = Path(__file__).resolve().parents[2]
PERSON = {
    f"GIT_{role}_{word}": value
    for role in ("AUTHOR", "COMMITTER")
    for word, value in (("NAME", "someone"), ("EMAIL", "someone@example.org"))
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of one commit with our pyproject.toml."""
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    environment = {**os.environ, **PERSON, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def commit_of(folder: Path) -> str:
    return git(folder, "rev-parse", "--short", "HEAD")


def test_a_tag_is_the_version_of_its_commit_and_the_next_commit_comes_before_the_next_release(
    clone: Path,
) -> None:
    git(clone, "tag", "v1.2.3")
    assert get_version(clone) == "1.2.3"

    git(clone, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert get_version(clone) == f"1.3.0.dev1+g{commit_of(clone)}"


def test_a_clone_without_tags_comes_before_the_first_release(clone: Path, tmp_path: Path) -> None:
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "second")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{clone}", "shallow")

    assert get_version(clone) == f"0.1.0.dev1+g{commit_of(clone)}"
    assert get_version(tmp_path / "shallow") == "0.1.0.dev0"


def test_sources_without_git_have_the_default_version(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())

    assert get_version(tmp_path) == version()


def test_a_tag_that_is_not_the_sources_version_is_refused() -> None:
    check_version(version())
    check_version("9.9.0.dev3+gabc")
    with pytest.raises(ReleaseError, match="found v9"):
        check_version("9.9.0")


def test_an_archive_keeps_contents_and_nothing_of_the_machine(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name, mode in (("b.py", 0o600), ("a.sh", 0o700)):
        (sources / name).write_text(name)
        (sources / name).chmod(mode)
    for number, names in enumerate((["a.sh", "b.py"], ["b.py", "a.sh"])):
        with tarfile.open(tmp_path / f"{number}.tar.gz", "w:gz") as archive:
            for name in names:
                os.utime(sources / name, (number, number))
                archive.add(sources / name, f"top/{name}")
        normalize(tmp_path / f"{number}.tar.gz", tmp_path / f"plain-{number}.tar.gz", 1_700_000_000)

    plain = tmp_path / "plain-0.tar.gz"
    assert plain.read_bytes() == (tmp_path / "plain-1.tar.gz").read_bytes()
    with gzip.open(plain) as zipped, tarfile.open(fileobj=zipped) as archive:
        members = archive.getmembers()
        assert [(each.name, each.mode, each.uname) for each in members] == [
            ("top/a.sh", 0o755, ""),
            ("top/b.py", 0o644, ""),
        ]
        assert {each.mtime for each in members} == {1_700_000_000}
        assert archive.extractfile("top/b.py").read() == b"b.py"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_constraints_fit_what_the_project_asks_for(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = chain(project["dependencies"], *project["optional-dependencies"].values())
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    asked = [Requirement(text) for text in texts]
    known = [
        (each, pinned[canonicalize_name(each.name)])
        for each in asked
        if canonicalize_name(each.name) in pinned
    ]

    assert len(known) > 50
    assert [str(each) for each, version in known if not each.specifier.contains(version)] == []


def test_only_the_publishing_job_gets_a_token_of_the_package_index() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]

    assert {"run": "make release"} in jobs["build"]["steps"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert jobs["publish"]["environment"]["name"] == "pypi"


def test_actions_of_the_workflow_are_pinned_by_commit() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]

    actions = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert [action for action in actions if not re.search(r"@[0-9a-f]{40}$", action)] == []
