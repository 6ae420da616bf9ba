"""A setting that cannot work is refused by its own name, once and before a job, wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest

from cast_ray.batch.driver import JobConfig
from cast_ray.config import BatchConfig
from cast_ray.errors import ConfigError


@pytest.mark.parametrize("temperature", [1e-5, float("inf")])
def test_a_temperature_that_every_row_would_be_refused_for_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=rf"^temperature={temperature}: .*at least 1e-4.* Try 0 or 0\.7$"):
        BatchConfig(temperature=temperature)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"foo": 1}}, r"engine\.foo=1: is no setting of EngineConfig\. Known settings: "),
        ({"pool": {"replicas": 0}}, r"pool\.replicas=0: Input should be greater than or equal to 1\. It is: "),
        ({"engine": 3}, r"engine=3: Input should be "),
        ({"temperature": float("nan")}, r"temperature=nan: Input should be greater than or equal to 0\."),
        ({"foo": 1}, r"foo=1: is no setting of JobConfig\. "),
    ],
)
def test_a_wrong_setting_is_named_with_its_path_and_its_own_problem(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        JobConfig(**settings)
