"""`JobConfig`: the settings of a batch job on files, and the demo that runs without any."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from cast_ray.batch.manifest import Manifest
from cast_ray.batch.storage import Storage
from cast_ray.config import BatchConfig
from cast_ray.errors import ConfigError, describe

SAMPLE_INPUT = Path(str(importlib.resources.files("cast_ray"))) / "data" / "sample_prompts.jsonl"
SAMPLE_OUTPUT = Path("demo-output")


class JobConfig(BatchConfig):
    """A batch job on files. Without `input` it answers the sample prompts that come with the package."""

    input: str | None = Field(
        None, description="Parquet, JSONL, CSV, text or Hugging Face dataset: a file, folder, URL or quoted glob"
    )
    output: str | None = Field(None, description="folder or URL for the rows with their answers and summary.json")
    output_format: Literal["parquet", "jsonl", "openai"] | None = Field(
        None, description="parquet, jsonl or openai; default: openai for OpenAI Batch files, else parquet"
    )
    overwrite: bool = Field(False, description="replace the output of an earlier job in that folder")
    retry_errors: bool = Field(False, description="run rows again that failed in an earlier run")
    limit: int | None = Field(
        None, ge=1, description="as a pilot only so many rows, and the projected time of the rest"
    )
    on_error: Literal["continue", "fail"] = Field("continue", description="what a failed row does to the job")
    max_error_rate: float | None = Field(
        None, ge=0, le=1, description="stop when a larger part of the rows has failed; looked at from 100 rows on"
    )
    attach: str | None = Field(
        None, description="name of a running `cast-ray serve` application, whose engines answer behind its own requests"
    )
    dry_run: bool = Field(False, description="show the plan and one rendered prompt, and start no engine")

    @model_validator(mode="after")
    def _does_one_thing(self) -> Self:
        if self.overwrite and self.retry_errors:
            problem = "cannot be said together with retry_errors"
            raise ConfigError(describe("overwrite", True, problem, "Retry what failed, or begin anew"))
        return self


def with_sample(config: JobConfig) -> JobConfig:
    """config with input and output filled in. The demo's own output may be replaced without asking."""
    if config.input is not None:
        if config.output is None and not config.dry_run:
            raise ConfigError(describe("output", None, "is missing", "Name a folder with --output DIR"))
        return config
    output = config.output if config.output is not None else str(SAMPLE_OUTPUT)
    is_demo = (there := Manifest.read(Storage.of("output", output))) is not None and there.demo
    replace = config.overwrite or (config.output is None and is_demo)
    return config.replace(input=str(SAMPLE_INPUT), output=output, overwrite=replace and not config.retry_errors)


def is_demo(config: JobConfig) -> bool:
    return config.input == str(SAMPLE_INPUT)
