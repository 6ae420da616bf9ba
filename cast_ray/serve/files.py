"""Uploaded files and batch records on disk, each a JSON record beside its content; nothing of them in memory.

A name from outside is never part of a path: ids are made here, and looked up only when they have their form.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cast_ray.serve.refusal import not_found

Record = dict[str, Any]
_ID = re.compile(r"(file|batch)-[0-9a-f]{24}")


class Store:
    """Records of one kind in a folder. kind: `file` or `batch`. A record has an owner, the only one who sees it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def new_id(self) -> str:
        """An id that nobody can guess."""
        return f"{self._kind}-{secrets.token_hex(12)}"

    def path(self, name: str, ending: str) -> Path:
        """Where a part of a record lies. The id must have come from `new_id` or `get`."""
        return self._folder / f"{name}{ending}"

    def save(self, record: Record) -> Record:
        """Write the record whole: a reader never sees half of one."""
        target = self.path(record["id"], ".json")
        draft = target.with_suffix(f".{secrets.token_hex(4)}.draft")
        draft.write_text(json.dumps(record), encoding="utf-8")
        os.replace(draft, target)
        return record

    def get(self, name: str, owner: str | None) -> Record:
        """The record; Refusal (404) where there is none, or none of this owner's."""
        if not _ID.fullmatch(name) or not name.startswith(f"{self._kind}-"):
            raise not_found(self._kind, name[:64])
        try:
            record: Record = json.loads(self.path(name, ".json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise not_found(self._kind, name) from None
        if record.get("owner") != owner:
            raise not_found(self._kind, name)
        return record

    def usage(self, owner: str | None) -> tuple[int, int]:
        """The owner's files: how many bytes, and how many. Of content alone; a record is a few hundred bytes."""
        sizes = [record["bytes"] for record in self.all() if record.get("owner") == owner]
        return sum(sizes), len(sizes)

    def all(self) -> Iterator[Record]:
        """Every record, of all owners, the newest first."""
        found = []
        for path in self._folder.glob(f"{self._kind}-*.json"):
            try:
                found.append(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                continue  # deleted meanwhile
        return iter(sorted(found, key=lambda record: (record["created_at"], record["id"]), reverse=True))

    def page(self, owner: str | None, after: str | None, limit: int) -> Record:
        """A page of the owner's records, in OpenAI's list form."""
        mine = [record for record in self.all() if record.get("owner") == owner]
        if after is not None:
            start = next((place + 1 for place, one in enumerate(mine) if one["id"] == after), len(mine))
            mine = mine[start:]
        shown = [public(record) for record in mine[:limit]]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(mine) > limit,
        }

    def delete(self, name: str) -> None:
        """The record and all that belongs to it."""
        for path in self._folder.glob(f"{name}.*"):
            path.unlink(missing_ok=True)


def public(record: Record) -> Record:
    """What the owner sees."""
    return {name: value for name, value in record.items() if name != "owner"}


def file_record(name: str, owner: str | None, filename: str, size: int, purpose: str) -> Record:
    """A file, as OpenAI describes one. filename: for show only."""
    shown = re.sub(r"[^\w. -]", "_", filename.replace("\\", "/").rsplit("/", 1)[-1])[:128] or "file"
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": int(time.time()),
        "filename": shown,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": None,
        "owner": owner,
    }
