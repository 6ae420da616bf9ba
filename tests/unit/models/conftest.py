"""Fixtures of tests that load models."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test but those of the embedded model sees the user's caches, and none the network."""
    monkeypatch.setenv("CAST_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
