"""Limits are numbers somebody typed: every one has a range, and a refusal names the key."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import ValidationError

from edgefl.cli.options import parse_limits
from edgefl.config.federation import Federation
from edgefl.errors import ConfigError
from edgefl.wire.limits import Limits

MAY_BE_ZERO = {"offline_grace_s", "ready_timeout_s", "retry_pause_s"}


@pytest.mark.sample(108)
@pytest.mark.parametrize("name", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [-1, 0, "nan", "inf", float("nan"), float("inf"), 1e30], ids=str)
def test_a_limit_out_of_range_is_refused_by_name(name: str, value: float | str) -> None:
    if value == 0 and name in MAY_BE_ZERO:
        assert getattr(msgspec.convert({name: value}, Limits, strict=False), name) == 0
        return

    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{name}"):
        msgspec.convert({name: value}, Limits, strict=False)


def test_a_chunk_too_small_for_the_fields_around_it_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="chunk_bytes"):
        msgspec.convert({"chunk_bytes": 255}, Limits, strict=False)


@pytest.mark.parametrize("name", ["chunk_bytes", "announcement_bytes"])
def test_a_message_that_no_device_reads_is_refused(name: str) -> None:
    limits = {name: 6 << 20}
    with pytest.raises(ValidationError, match=f"limits.{name}: expected 4194304 at most.*found 6291456"):
        Federation.model_validate({"limits": limits})
    Federation.model_validate({"limits": {**limits, "max_message_bytes": 6 << 20}})


def test_the_defaults_are_within_their_ranges() -> None:
    assert msgspec.convert(msgspec.to_builtins(Limits()), Limits) == Limits()


def test_the_command_line_names_the_limit_it_refuses() -> None:
    with pytest.raises(ConfigError, match="checkpoint_steps"):
        parse_limits(["checkpoint_steps=0"])
