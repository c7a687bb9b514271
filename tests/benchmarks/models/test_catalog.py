"""Which architectures there are, and how they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.models.architecture import LIBRARIES
from benchmarks.models.catalog import ARCHITECTURES, HELD_OUT, chosen, named
from benchmarks.models.held_out.plain import PLAIN as OTHERS_CODE
from benchmarks.models.plain import PLAIN
from edgefl.errors import ConfigError


def test_there_are_sixty_that_others_wrote_each_with_a_name_of_its_own() -> None:
    assert len({each.path for each in ARCHITECTURES}) == len(ARCHITECTURES)
    assert sum(each.library != "plain" for each in ARCHITECTURES) >= 60
    assert {each.library for each in ARCHITECTURES} == set(LIBRARIES)


@pytest.mark.slow
def test_they_are_listed_without_the_libraries_that_make_them() -> None:
    script = (
        "import sys; import benchmarks.models.catalog; "
        "print(sorted({'transformers', 'torchvision', 'timm'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"


def test_a_pattern_is_of_a_name_a_class_or_a_path_in_any_case() -> None:
    def paths(*only: str) -> list[str]:
        return [each.path for each in chosen(only)]

    assert paths("bert") == ["transformers/BERT"]
    assert paths("*MaskedLM") == ["transformers/BERT, masked words"]
    assert paths("plain/u-net*", "mamba") == ["plain/U-Net, pixels", "transformers/Mamba"]
    assert chosen(libraries=["plain"]) == list(PLAIN)
    assert named("transformers/Mamba").kind == "MambaForCausalLM"


def test_a_pattern_that_matches_nothing_is_told_with_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match="no architecture matches 'resnet99'; choose among: plain/LSTM tagger"
    ):
        chosen(["resnet99"])
    with pytest.raises(ConfigError, match="no architecture 'plain/none'"):
        named("plain/none")


def test_those_held_out_are_others() -> None:
    paths = {each.path for each in HELD_OUT}

    assert len(paths) == len(HELD_OUT) and paths.isdisjoint(each.path for each in ARCHITECTURES)
    assert {each.library for each in HELD_OUT} == set(LIBRARIES)
    assert {each.path for each in chosen(held_out=True)} == paths
    assert named("timm/EVA-02") in HELD_OUT


@pytest.mark.parametrize("architecture", [*PLAIN, *OTHERS_CODE], ids=lambda each: each.name)
def test_plain_code_is_what_it_is_said_to_be(architecture) -> None:  # type: ignore[no-untyped-def]
    assert type(architecture.make()).__name__ == architecture.kind
