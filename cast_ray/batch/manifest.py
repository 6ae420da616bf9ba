"""`job.json`: what the rows in an output folder are answers to, so that only the same job goes on in it."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from cast_ray.batch.formats import InputPlan
from cast_ray.batch.storage import Storage
from cast_ray.config import BatchConfig

JOB_FILE = "job.json"
_VERSION = 1
# Settings that say how and where the work is done; all others change the answers, or the shape of the output.
_OF_THE_RUN = frozenset(
    {
        "engine",
        "pool",
        "batch_size",
        "group_prefixes",
        "input",
        "output",
        "overwrite",
        "retry_errors",
        "limit",
        "on_error",
        "max_error_rate",
        "dry_run",
        "attach",
    }
)
_OF_THE_ENGINE = ("target", "dtype", "max_context")
# Bytes of a file's head and tail that are looked at, and most files of which they are.
_LOOK_BYTES = 65536
_LOOK_FILES = 1000


@dataclass(frozen=True)
class Manifest:
    """answers: the settings that change answers. inputs: a fingerprint of each file by its name. created: Unix time."""

    answers: dict[str, Any]
    inputs: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))
    demo: bool = False

    @classmethod
    def of(cls, config: BatchConfig, plan: InputPlan, output_format: str, demo: bool = False) -> Manifest:
        values = config.model_dump(mode="json")
        answers = {name: value for name, value in values.items() if name not in _OF_THE_RUN}
        answers |= {f"engine.{name}": values["engine"][name] for name in _OF_THE_ENGINE}
        answers["output_format"] = output_format
        look = len(plan.files) <= _LOOK_FILES
        inputs = {file.name: _fingerprint(plan.place, file.path, file.size, look) for file in plan.files}
        return cls(json.loads(json.dumps(answers)), inputs, demo=demo)

    @classmethod
    def read(cls, output: Storage) -> Manifest | None:
        """The one in the folder; None where there is none that this version can read."""
        try:
            found = json.loads(output.read(JOB_FILE))
            if found["version"] != _VERSION:
                return None
            return cls(dict(found["answers"]), dict(found["inputs"]), int(found["created"]), found["demo"] is True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, output: Storage) -> None:
        text = json.dumps({"version": _VERSION, **vars(self)}, indent=2, ensure_ascii=False)
        output.write(JOB_FILE, f"{text}\n".encode())

    def unlike(self, other: Manifest) -> str | None:
        """How other differs from this one, for a person; None where it is the same job."""
        for name in sorted({*self.answers, *other.answers}):
            mine, theirs = self.answers.get(name), other.answers.get(name)
            if mine != theirs:
                return f"{name} is {_short(theirs)} there and {_short(mine)} here"
        if gone := sorted(set(other.inputs) - set(self.inputs)):
            return f"its input has a file {gone[0]} that is not in this one"
        if new := sorted(set(self.inputs) - set(other.inputs)):
            return f"its input lacks the file {new[0]}"
        changed = sorted(name for name, about in self.inputs.items() if other.inputs[name] != about)
        return f"its input {changed[0]} was another file, or has changed" if changed else None


def _fingerprint(place: Storage, path: str, size: int, look: bool) -> str:
    if not look:
        return f"{size}"
    with place.filesystem.open_input_file(path) as file:
        seen = file.read(_LOOK_BYTES)
        if size > _LOOK_BYTES:
            file.seek(max(_LOOK_BYTES, size - _LOOK_BYTES))
            seen += file.read(_LOOK_BYTES)
    return f"{size}-{hashlib.blake2b(seen, digest_size=8).hexdigest()}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
