"""A storm of clients on a server that is started here, a replica killed in the middle; or a batch job beside people.

Clients ask in turn, each waiting for its answer: some go away after the first piece of a stream, some send what must be
refused, the others want what `Engine.generate` gives for the same seed. Reported, and judged by the exit status:

- hung: requests without an end after --patience seconds
- wrong: answers that differ from the engine's, refusals of the wrong kind, streams that break off without an error
- lost: 503, proper, of requests that were aboard the killed replica
- memory of every process of Serve, and pages that are not free again at the end

With --attached-rows N instead: time to the first token of requests that come at random moments, first on idle replicas,
then beside an attached batch job of N rows, and whether the job has an answer for every row.

    python benchmarks/serve_stress.py                              # 200 clients, two minutes
    python benchmarks/serve_stress.py --attached-rows 1000
    python benchmarks/serve_stress.py --attached-rows 300 --target embedded --replicas 1

Without --target the model is a tiny random one: what is stressed is the way to it. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from cast_ray.request import SamplingParams
from tests.serving import Server, running_server, wait_for

BAD: list[tuple[dict[str, Any], int]] = [
    ({"temperature": 7}, 400),
    ({"zork": 1}, 400),
    ({"model": "another"}, 404),
    ({"prompt": ""}, 400),
    ({"prompt": "t1 " * 2000}, 400),
    ({"max_tokens": -1}, 400),
]
MIB = 2**20
# Memory is compared from here on: until then caches and pools fill.
SETTLED = 0.4
# Processes are judged that lived for so much of the storm.
OLD_ENOUGH = 0.7


@dataclass
class Storm:
    """What is asked, and what came of it."""

    server: Server
    model: str
    bodies: list[dict[str, Any]]
    expected: list[str]
    patience_s: float
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def client(self, number: int, until: float, leaving: float, invalid: float) -> None:
        """One that asks until the time is up."""
        draw = random.Random(number)
        headers = {"authorization": f"Bearer {self.server.keys['free']}"}
        async with httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=None) as http:
            while time.monotonic() < until:
                kind = draw.random()
                which = draw.randrange(len(self.bodies))
                try:
                    async with asyncio.timeout(self.patience_s):
                        if kind < leaving:
                            outcome = await self.leave(http, which)
                        elif kind < leaving + invalid:
                            outcome = await self.bad(http, which, *draw.choice(BAD))
                        elif draw.random() < 0.5:
                            outcome = await self.whole(http, which)
                        else:
                            outcome = await self.streamed(http, which)
                except TimeoutError:
                    outcome = "hung"
                except httpx.HTTPError as error:
                    outcome = self.mistake(f"{type(error).__name__}")
                self.outcomes[outcome] += 1
                if outcome in ("429", "503"):
                    await asyncio.sleep(draw.uniform(0.2, 1.5))

    async def whole(self, http: httpx.AsyncClient, which: int) -> str:
        """Wait for the whole answer."""
        answer = await http.post("/v1/completions", json=self.bodies[which])
        if answer.status_code != 200:
            return self.refused(answer.status_code, answer.headers, answer.text)
        return self.judged(which, answer.json()["choices"][0]["text"], "whole")

    async def streamed(self, http: httpx.AsyncClient, which: int) -> str:
        """Read a stream to its end."""
        text, ended = "", False
        async with http.stream("POST", "/v1/completions", json={**self.bodies[which], "stream": True}) as answer:
            if answer.status_code != 200:
                return self.refused(answer.status_code, answer.headers, (await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return self.refused(503, answer.headers, line[6:], streaming=True)
                    text += "".join(choice["text"] for choice in chunk["choices"])
        return self.judged(which, text, "streamed") if ended else self.mistake("a stream broke off without an error")

    async def leave(self, http: httpx.AsyncClient, which: int) -> str:
        """Go away after the first piece."""
        async with http.stream("POST", "/v1/completions", json={**self.bodies[which], "stream": True}) as answer:
            if answer.status_code != 200:
                return self.refused(answer.status_code, answer.headers, (await answer.aread()).decode())
            async for _ in answer.aiter_lines():
                break
        return "left"

    async def bad(self, http: httpx.AsyncClient, which: int, changes: dict[str, Any], status: int) -> str:
        """Ask for what cannot be."""
        answer = await http.post("/v1/completions", json={**self.bodies[which], **changes})
        if answer.status_code != status:
            return self.refused(answer.status_code, answer.headers, answer.text)
        whole = set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return "refused" if whole else self.mistake(f"a refusal without its fields: {answer.text[:200]}")

    def judged(self, which: int, text: str, kind: str) -> str:
        """Whether an answer is the engine's."""
        if text == self.expected[which]:
            return kind
        return self.mistake(f"{text[:80]!r} instead of {self.expected[which][:80]!r}")

    def refused(self, status: int, headers: Any, text: str, streaming: bool = False) -> str:
        """Whether an error is one that may come: queues are full, or the engine was lost."""
        try:
            error = json.loads(text)["error"]
            proper = {"message", "type", "param", "code"} == set(error)
        except (ValueError, KeyError, TypeError):
            return self.mistake(f"{status}: {text[:200]}")
        if proper and status == 429 and int(headers.get("retry-after", 0)) > 0:
            return "429"
        if proper and status == 503 and error["code"] in ("engine_failed", "unavailable"):
            return "lost" if streaming or error["code"] == "engine_failed" else "503"
        return self.mistake(f"{status}: {text[:200]}")

    def mistake(self, what: str) -> str:
        """Remember what should not have been."""
        self.wrong.append(what)
        return "wrong"


@contextmanager
def memory(every_s: float = 1.0) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Resident MiB of the processes of Serve in this process's own cluster, by their names."""
    found: dict[str, list[tuple[float, float]]] = {}
    ending = threading.Event()

    def watch() -> None:
        while not ending.wait(every_s):
            for name, pid in serve_processes():
                try:
                    fields = Path(f"/proc/{pid}/statm").read_text().split()
                except OSError:
                    continue  # ended meanwhile
                pages = int(fields[1])
                found.setdefault(f"{name} {pid}", []).append(
                    (time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE") / MIB)
                )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield found
    ending.set()
    thread.join()


def serve_processes() -> Iterator[tuple[str, int]]:
    """Names and ids of the replicas and proxies of this process's own cluster."""
    own = os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        kind = next((name for name in ("ServeReplica", "ProxyActor") if name in title), None)
        if kind is not None and own in ancestors(int(folder.name)):
            yield title.removeprefix("ray::").split(" ")[0].split(".")[0], int(folder.name)


def ancestors(pid: int) -> set[int]:
    """Ids of the processes above one."""
    found: set[int] = set()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            break
        found.add(pid)
    return found


def growth(samples: list[tuple[float, float]]) -> tuple[float, float, float]:
    """MiB when settled, at the end, and how much they grew in a minute in between."""
    began, ended = samples[0][0], samples[-1][0]
    late = [(at, size) for at, size in samples if at >= began + SETTLED * (ended - began)]
    if len(late) < 3:
        return samples[0][1], samples[-1][1], 0.0
    times, sizes = np.array(late).T
    return sizes[0], sizes[-1], float(np.polyfit(times / 60, sizes, 1)[0])


async def storm(server: Server, options: argparse.Namespace) -> bool:
    """All clients, and the killing. Whether all was as it should be."""
    draw = random.Random(options.seed)
    bodies: list[dict[str, Any]] = []
    expected = []
    print("answers of the engine alone …", flush=True)
    for number in range(options.prompts):
        prompt = " ".join(f"t{draw.randrange(60)}" for _ in range(draw.choice((2, 8, 40, 150))))
        wanted = {"max_tokens": draw.choice((4, 16, 60)), "temperature": number % 2 * 0.8, "seed": number}
        bodies.append({"model": options.model, "prompt": prompt, **wanted})
        expected.append(server.engine.generate([prompt], SamplingParams(**wanted))[0].text)
    run = Storm(server, options.model, bodies, expected, options.patience)
    victims: list[int] = []

    async def kill() -> None:
        await asyncio.sleep(options.seconds / 2)
        while not (replicas := await asyncio.to_thread(server.replicas)):
            await asyncio.sleep(0.5)
        victims.append(max(replicas, key=lambda one: one["aboard"])["pid"])
        os.kill(victims[0], signal.SIGKILL)

    began = time.monotonic()
    with memory() as sizes:
        killing = asyncio.create_task(kill())
        await asyncio.gather(
            *(
                run.client(number, began + options.seconds, options.leaving, options.invalid)
                for number in range(options.clients)
            )
        )
        await killing
        seconds = time.monotonic() - began
    # A replica that was killed comes back, and nothing is left aboard any.
    await asyncio.to_thread(wait_for, lambda: recovered(server, victims, options.replicas))
    total = sum(run.outcomes.values())
    print(f"{options.clients} clients, {seconds:.0f} s, {total} requests: {dict(run.outcomes.most_common())}")
    flat = True
    for name, samples in sorted(sizes.items()):
        settled, last, slope = growth(samples)
        lasted = samples[-1][0] - samples[0][0]
        print(
            f"  {name}: {settled:.0f} MiB settled, {last:.0f} at the end ({slope:+.1f} a minute, over {lasted:.0f} s)"
        )
        # Of one that came in the middle there is too little to go by: it loads its model meanwhile.
        flat = flat and (lasted < OLD_ENOUGH * seconds or last - settled < max(30.0, 0.1 * settled))
    print("all pages free, nothing aboard, the killed replica replaced")
    for what in run.wrong[:10]:
        print(f"  wrong: {what}")
    if not flat:
        print("  memory grew by more than a tenth")
    return flat and not run.wrong and not run.outcomes["hung"]


def recovered(server: Server, victims: list[int], replicas: int) -> bool:
    """Whether all replicas are up, the victims are gone, and no request or page is held."""
    time.sleep(2)
    found = server.replicas()
    return (
        len(found) == replicas
        and not {one["pid"] for one in found} & set(victims)
        and all(
            one["aboard"] == 0
            and one["engine"]["running"] == one["engine"]["waiting"] == 0
            and one["engine"]["kv_pages_free"] == one["engine"]["kv_pages"]
            for one in found
        )
    )


async def first_tokens(server: Server, options: argparse.Namespace, done: threading.Event, most: float) -> list[float]:
    """Seconds to the first piece of requests at random moments, until `done` or for `most` seconds."""
    draw, found, tasks = random.Random(options.seed), [], []
    headers = {"authorization": f"Bearer {server.keys['free']}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=options.patience) as http:

        async def ask(number: int) -> None:
            prompt = " ".join(f"t{(number * 7 + place) % 60}" for place in range(24))
            body = {"model": options.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
            began, first = time.monotonic(), None
            async with http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if first is None and line.startswith("data: "):
                        first = time.monotonic() - began
            assert first is not None
            found.append(first)

        until = time.monotonic() + most
        while time.monotonic() < until and not done.is_set():
            tasks.append(asyncio.create_task(ask(len(tasks))))
            await asyncio.sleep(draw.expovariate(options.rate))
        await asyncio.gather(*tasks)
    return found


async def beside_a_batch(server: Server, options: argparse.Namespace, folder: Path) -> bool:
    """The ratio of times to the first token, and the batch's rows."""
    from cast_ray.batch.driver import JobConfig, run_job

    rows = [
        {"id": number, "prompt": f"t{number % 60} t{number // 60 % 60} t5"} for number in range(options.attached_rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = JobConfig(
        input=str(folder / "rows.jsonl"),
        output=str(folder / "out"),
        attach="cast-ray",
        engine=server.engine.config,
        max_tokens=options.row_tokens,
        sampling={"ignore_eos": True},
    )
    await first_tokens(server, options, threading.Event(), 3)
    idle = await first_tokens(server, options, threading.Event(), options.seconds)
    done, result = threading.Event(), {}

    def run() -> None:
        try:
            result.update(run_job(job, console=Console(file=io.StringIO())))
        finally:
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    # Until rows are aboard there is nothing to be beside of.
    while not done.is_set() and not any(one["outstanding_tokens"] for one in await asyncio.to_thread(server.replicas)):
        await asyncio.sleep(0.2)
    began = time.monotonic()
    beside = await first_tokens(server, options, done, 3600)
    took = time.monotonic() - began
    thread.join()
    for name, times in (("idle", idle), ("beside the batch", beside)):
        p50, p90 = np.percentile(times, (50, 90)) * 1000
        print(f"{name}: {len(times)} requests, first token after {p50:.0f} ms (p50), {p90:.0f} ms (p90)")
    print(f"ratio of medians: {np.median(beside) / np.median(idle):.2f}")
    print(f"batch: {result.get('answered')} of {options.attached_rows} rows answered, in {took:.0f} s")
    return result.get("answered") == options.attached_rows


def main(arguments: list[str] | None = None) -> int:
    """0 where all was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120, help="of the storm, or of the idle measurement")
    parser.add_argument("--leaving", type=float, default=0.1, help="share of requests whose client goes away")
    parser.add_argument("--invalid", type=float, default=0.05, help="share of requests that must be refused")
    parser.add_argument("--patience", type=float, default=120, help="a request that takes longer hangs")
    parser.add_argument("--prompts", type=int, default=60, help="different requests")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="max_batch_size of each replica")
    parser.add_argument("--target", help="default: a tiny random model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attached-rows", type=int, help="measure beside a batch of so many rows instead")
    parser.add_argument("--row-tokens", type=int, default=60, help="tokens of each row of that batch")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second that are measured beside it")
    options = parser.parse_args(arguments)
    options.model = "tiny"
    engine: dict[str, Any] = {"max_batch_size": options.batch, "max_waiting": 64, "kv_cache_tokens": 16384}
    if options.target:
        engine |= {"target": options.target, "drafter": "auto", "width": "joint", "max_context": 1024}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_server(folder, replicas=options.replicas, engine=engine, max_ongoing=256) as server:
            if options.attached_rows:
                fine = asyncio.run(beside_a_batch(server, options, folder))
            else:
                fine = asyncio.run(storm(server, options))
    print("as it should be" if fine else "NOT as it should be")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
