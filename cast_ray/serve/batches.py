"""Batch files: every line a request, run on the engines that serve people, behind them in every round.

Answers are written as they come. A server that ends in the middle goes on with the lines that have none when it is
started again; a sampled line without a seed gets one from its batch and name, so that it matters to nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cast_ray.config import ServeLimits
from cast_ray.request import derive_seed
from cast_ray.serve.answers import question_of, whole
from cast_ray.serve.backend import Backend
from cast_ray.serve.files import Record, Store, file_record
from cast_ray.serve.protocol import ChatRequest, CompletionRequest, refusal_of
from cast_ray.serve.recent import Recent
from cast_ray.serve.refusal import Refusal, internal_error
from cast_ray.serve.wire import BATCH

logger = logging.getLogger(__name__)
BODIES: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MOST_ERRORS = 50
WINDOW_S = 24 * 3600
# A line that no engine takes at present is tried again after so long, for as long as the batch runs.
PAUSE_S = 2.0
MOST_LOST = 2
# Batches of a key that are told of after they have ended, and when to ask again for room for another.
REMEMBERED = 1000
RETRY_S = 60


@dataclass(frozen=True)
class Line:
    """One request of a batch file."""

    number: int
    custom_id: str
    body: dict[str, Any]


class Batches:
    """Runs batches one after the other. Use from one event loop."""

    def __init__(self, folder: Path, limits: ServeLimits, model: str, concurrency: int) -> None:
        self.files = Store(folder / "files", "file")
        self.records = Store(folder / "batches", "batch")
        self._limits = limits
        self._model = model
        self._concurrency = concurrency
        # Of its own: a batch's latencies say nothing of what people wait for.
        self._recent = Recent()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._current: tuple[str, asyncio.Task[None]] | None = None
        self._counts: dict[str, int] = {}

    def make_room(self, owner: str | None) -> None:
        """For one more batch: the owner's oldest that have ended are forgotten. Refusal (429) where too many have not.
        Reads every record: call it in a thread."""
        mine = [record for record in self.records.all() if record.get("owner") == owner]
        if sum(record["status"] in OPEN for record in mine) >= self._limits.batches:
            message = f"This key may have {self._limits.batches} batches that are not done."
            raise Refusal(429, message, code="batch_limit_exceeded", retry_after=RETRY_S)
        for record in [one for one in mine if one["status"] not in OPEN][REMEMBERED - 1 :]:
            self.records.delete(record["id"])

    def create(self, owner: str | None, file_id: str, endpoint: str, window: str, metadata: Any) -> Record:
        """A batch of a file that the owner has uploaded. It waits for its turn."""
        self.files.get(file_id, owner)
        now = int(time.time())
        times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at")
        record = {
            "id": self.records.new_id(),
            "object": "batch",
            "endpoint": endpoint,
            "model": self._model,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_S,
            **dict.fromkeys((*times, "cancelled_at")),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            "owner": owner,
        }
        self.records.save(record)
        self._queue.put_nowait(record["id"])
        return record

    def get(self, name: str, owner: str | None) -> Record:
        """A batch of the owner's, with counts as they are now."""
        return {**self.records.get(name, owner), **self._live(name)}

    def cancel(self, name: str, owner: str | None) -> Record:
        """Stop it; lines that were answered stay answered. Refusal (409) where it has ended."""
        record = self.records.get(name, owner)
        if record["status"] not in OPEN:
            raise Refusal(409, f"Batch {name} has ended: it is {record['status']}.", code="batch_ended")
        record = self.records.save({**record, "status": "cancelling", "cancelling_at": int(time.time())})
        if self._current is not None and self._current[0] == name:
            self._current[1].cancel()
        return record

    def running(self) -> list[Record]:
        """Batches that are not done, for the page: without owners, files or metadata."""
        found = [record for record in self.records.all() if record["status"] in OPEN]
        shown = ("id", "status", "endpoint", "created_at", "request_counts")
        return [{**{key: one[key] for key in shown}, **self._live(one["id"])} for one in found]

    def _live(self, name: str) -> Record:
        if self._current is None or self._current[0] != name:
            return {}
        return {"request_counts": dict(self._counts)}

    async def run(self, backend: Backend) -> None:
        """Until cancelled: take up what an earlier server left, then each batch as it comes."""
        for record in reversed(list(self.records.all())):
            if record["status"] in OPEN:
                self._queue.put_nowait(record["id"])
        while True:
            name = await self._queue.get()
            record = json.loads(self.records.path(name, ".json").read_text(encoding="utf-8"))
            task = asyncio.create_task(self._run_one(record, backend))
            self._current = (name, task)
            try:
                await task
            except asyncio.CancelledError:
                if not task.done() or not self._cancelling(name):
                    task.cancel()
                    raise
                stored = json.loads(self.records.path(name, ".json").read_text(encoding="utf-8"))
                self._finish({**stored, "request_counts": dict(self._counts)}, "cancelled")
            except Exception as error:
                logger.error("batch %s failed: %s", name, type(error).__name__)
                self._fail(record, [{"code": "server_error", "message": internal_error().message, "line": None}])
            finally:
                self._current = None

    async def _run_one(self, record: Record, backend: Backend) -> None:
        name = record["id"]
        if record["status"] == "cancelling":
            return self._finish(record, "cancelled")
        source = self.files.path(record["input_file_id"], ".bin")
        errors, total = await asyncio.to_thread(check_lines, source, record["endpoint"], self._limits.batch_rows)
        if errors:
            return self._fail(record, errors)
        began = record["in_progress_at"] or int(time.time())
        record.update(status="in_progress", in_progress_at=began)
        output, failures = (self.records.path(name, ending) for ending in (".out", ".err"))
        answered = await asyncio.to_thread(answered_lines, output)
        failed = await asyncio.to_thread(answered_lines, failures)
        self._counts = {"total": total, "completed": len(answered), "failed": len(failed)}
        self.records.save({**record, "request_counts": dict(self._counts)})
        todo = (line for line in read_lines(source) if line.custom_id not in answered | failed)
        with output.open("a", encoding="utf-8") as good, failures.open("a", encoding="utf-8") as bad:

            async def work() -> None:
                for line in todo:
                    status, body = await self._answer(line, record, backend)
                    fine = status == 200
                    (good if fine else bad).write(json.dumps(_written(line, status, body)) + "\n")
                    (good if fine else bad).flush()
                    self._counts["completed" if fine else "failed"] += 1

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._concurrency, total)):
                        group.create_task(work())
            finally:
                record["request_counts"] = dict(self._counts)
        record.update(finalizing_at=int(time.time()))
        self._finish(record, "completed")
        return None

    async def _answer(self, line: Line, record: Record, backend: Backend) -> tuple[int, dict[str, Any]]:
        seed = derive_seed(record["id"], line.custom_id)
        lost = 0
        while True:
            try:
                try:
                    request = BODIES[record["endpoint"]].model_validate_json(json.dumps(line.body))
                except ValidationError as error:
                    raise refusal_of(error) from None
                if request.stream:
                    raise Refusal(400, "A batch's requests cannot stream.", param="stream")
                question = question_of(
                    request,
                    self._limits,
                    self._model,
                    priority=BATCH,
                    seconds=WINDOW_S,
                    seed=seed,
                    lookup_scope=f"batch {record['id']}",
                )
                body, _ = await whole(question, backend, self._recent)
                return 200, body
            except Refusal as refusal:
                # A line that takes its engines down with it is given up; one that finds no room is not.
                lost += refusal.code == "engine_failed"
                if refusal.status not in (429, 503) or lost > MOST_LOST:
                    return refusal.status, refusal.body()
            except Exception as error:
                logger.error("batch %s line %d: %s", record["id"], line.number, type(error).__name__)
                return 500, internal_error().body()
            await asyncio.sleep(PAUSE_S)

    def _finish(self, record: Record, status: str) -> None:
        """Give the answers to the owner as files."""
        changes: Record = {"status": status, f"{status}_at": int(time.time())}
        for ending, field, shown in ((".out", "output_file_id", "output"), (".err", "error_file_id", "errors")):
            path = self.records.path(record["id"], ending)
            if path.exists() and path.stat().st_size:
                name = self.files.new_id()
                size = path.stat().st_size
                path.replace(self.files.path(name, ".bin"))
                about = file_record(name, record["owner"], f"{record['id']}_{shown}.jsonl", size, "batch_output")
                self.files.save(about)
                changes[field] = name
            else:
                path.unlink(missing_ok=True)
        self.records.save({**record, **changes})

    def _fail(self, record: Record, errors: list[Record]) -> None:
        shown = {"object": "list", "data": [{"param": None, **error} for error in errors]}
        self.records.save({**record, "status": "failed", "failed_at": int(time.time()), "errors": shown})

    def _cancelling(self, name: str) -> bool:
        found = json.loads(self.records.path(name, ".json").read_text(encoding="utf-8"))
        return bool(found["status"] == "cancelling")


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a checked batch file."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                parsed = json.loads(raw)
                yield Line(number, parsed["custom_id"], parsed["body"])


def check_lines(path: Path, endpoint: str, most: int) -> tuple[list[Record], int]:
    """What is wrong with the file as a whole, and how many requests it has. Bodies are judged one by one later."""
    errors: list[Record] = []
    names: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            total += 1
            problem = _problem(raw, endpoint, names)
            if total > most:
                problem = ("too_many_requests", f"The file has more than the {most} requests of one batch.")
            if problem is not None:
                errors.append({"code": problem[0], "message": problem[1], "line": number})
            if len(errors) >= MOST_ERRORS or total > most:
                break
    if not total:
        errors.append({"code": "empty_file", "message": "The file has no requests.", "line": None})
    return errors, total


def _problem(raw: bytes, endpoint: str, names: set[str]) -> tuple[str, str] | None:
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return "invalid_json_line", "This line is not JSON."
    if not isinstance(parsed, dict) or not isinstance(parsed.get("body"), dict):
        return "invalid_request", "A line needs custom_id, method, url and body."
    name = parsed.get("custom_id")
    if not isinstance(name, str) or not name or len(name) > 512:
        return "missing_required_parameter", "custom_id must be a string of 1 to 512 characters."
    if name in names:
        return "duplicate_custom_id", "custom_id was used on an earlier line."
    names.add(name)
    if parsed.get("method") != "POST" or parsed.get("url") != endpoint:
        return "invalid_url", f"method must be POST and url {endpoint}, the batch's endpoint."
    return None


def answered_lines(path: Path) -> set[str]:
    """Names of the lines that have an answer; half of one at the file's end is cut off."""
    if not path.exists():
        return set()
    found, whole_bytes = set(), 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            whole_bytes += len(raw)
            found.add(json.loads(raw)["custom_id"])
    with path.open("rb+") as file:
        file.truncate(whole_bytes)
    return found


def _written(line: Line, status: int, body: dict[str, Any]) -> Record:
    response = {"status_code": status, "request_id": body.get("id", ""), "body": body}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }
