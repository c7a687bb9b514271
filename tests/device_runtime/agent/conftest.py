"""Stores of agents in memory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(folder_in_memory: Path) -> Path:
    return folder_in_memory
