"""The files that an input names: a file, a folder, a glob, or a folder of Hugging Face `datasets`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cast_ray.batch.storage import CODECS, Storage
from cast_ray.errors import InputError, describe

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".txt": "text",
}
_READABLE = "Readable are .parquet, .arrow, .jsonl, .csv and .txt, the last three also with .gz or .zst"
# Written by `datasets` beside the files of a saved dataset.
_HF_STATE = "state.json"


@dataclass(frozen=True)
class InputFile:
    """path: in its file system. name: unique within the input, and the same wherever the input lies."""

    path: str
    name: str
    kind: str
    size: int


def kind_of(path: str) -> str | None:
    """The format that a file's name tells, or None."""
    name = PurePosixPath(path)
    if name.suffix.lower() not in CODECS:
        return FORMATS.get(name.suffix.lower())
    kind = FORMATS.get(PurePosixPath(name.stem).suffix.lower())
    return kind if kind in ("jsonl", "csv", "text") else None


def find_files(place: Storage) -> list[InputFile]:
    """The input's files, in the order of their names. Raises InputError where there are none that can be read."""
    info = place.info()
    if place.is_file():
        kind = kind_of(place.path)
        if kind is None:
            suffix = PurePosixPath(place.path).suffix
            problem = f"has the unknown extension {suffix!r}" if suffix else "has no extension"
            raise InputError(describe("input", place.shown, problem, _READABLE))
        return [InputFile(_real(place, place.path), PurePosixPath(place.path).name, kind, info.size)]
    if place.is_folder():
        found = {name: (place.join(name), size) for name, size in place.files(recursive=True).items()}
        # Hidden and underscored names are markers of other tools, as in every Parquet reader.
        found = {name: file for name, file in found.items() if not any(part[0] in "._" for part in name.split("/"))}
        found = _without_caches(place, found)
    elif any(sign in place.path for sign in "*?["):
        paths = place.matches()
        if not paths:
            problem = "matches no file"
            raise InputError(describe("input", place.shown, problem, "Check the pattern, and quote it in a shell"))
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
        sizes = [info.size for info in place.filesystem.get_file_info(paths)]
        found = {os.path.relpath(path, root): (path, size) for path, size in zip(paths, sizes, strict=True)}
    else:
        remedy = f"Check the path (from {Path.cwd()})" if place.is_local else "Check the bucket and the key"
        raise InputError(describe("input", place.shown, "does not exist", remedy))
    usable = [
        InputFile(_real(place, path), name, kind, size)
        for name, (path, size) in found.items()
        if (kind := kind_of(name)) is not None
    ]
    if not usable:
        raise InputError(describe("input", place.shown, "holds no readable file", _READABLE))
    return sorted(usable, key=lambda file: file.name)


def _without_caches(place: Storage, found: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Of a saved dataset only the files that its state names: caches of earlier maps and filters lie beside them."""
    for name in [name for name in found if PurePosixPath(name).name == _HF_STATE]:
        try:
            listed = {entry["filename"] for entry in json.loads(place.read(name))["_data_files"]}
        except (ValueError, KeyError, TypeError):
            continue
        folder = str(PurePosixPath(name).parent)
        found = {
            other: file
            for other, file in found.items()
            if str(PurePosixPath(other).parent) != folder
            or not other.endswith(".arrow")
            or PurePosixPath(other).name in listed
        }
    return found


def _real(place: Storage, path: str) -> str:
    return os.path.realpath(path) if place.is_local else path
