"""Open-loop load on any OpenAI-compatible URL: requests come at random moments, whether or not others are answered.

For each rate (requests a second, Poisson arrivals): time to the first token, time between tokens, tokens a second, and
goodput, the share and number a second of requests within the SLO: a limit to the first token and one between tokens, of
which several may be given. With --concurrency instead of --rates that many clients ask in turn, each waiting for its
answer. Arrivals and prompts follow from --seed, so that two servers get the same load. Between tokens: from the first
chunk to the last, over the tokens behind those of the first.

    python benchmarks/serving.py --url http://127.0.0.1:8001/v1 --rates 0.5,1,2 --seconds 60 --json there.json

With --widths it starts `cast-ray serve` itself, once for each width, one after the other, and sets them beside the
first. What stands behind `--` goes to `cast-ray serve`.

    python benchmarks/serving.py --widths ar,chain,joint --rates 0.2,0.5 --seconds 45 --max-tokens 48
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai

OWN = Path(__file__).parents[1] / "tests" / "data" / "prompts.jsonl"


@dataclass
class Sent:
    """One request: seconds since the load began, and what came of it. gap_s: mean between tokens."""

    due: float
    status: str = "open"
    first_s: float | None = None
    total_s: float | None = None
    gap_s: float | None = None
    tokens: int = 0
    rounds: int = 0


@dataclass
class Load:
    """What to send. slo: most seconds to the first token, and most between tokens, of each goodput."""

    client: openai.AsyncOpenAI
    model: str
    prompts: list[str]
    max_tokens: int
    temperature: float
    slo: list[tuple[float, float]]
    sent: list[Sent] = field(default_factory=list)

    async def ask(self, number: int, one: Sent) -> None:
        """One streamed chat, timed from when it was due: a client that is late counts its own delay too."""
        prompt = self.prompts[number % len(self.prompts)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        chunks, last = 0, began
        try:
            stream = await self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=number,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.choices and (chunk.choices[0].delta.content or chunk.choices[0].finish_reason):
                    last = loop.time()
                    chunks += 1
                    one.first_s = one.first_s if one.first_s is not None else last - began
                if chunk.usage is not None:
                    one.tokens = chunk.usage.completion_tokens
                    one.rounds = (getattr(chunk.usage, "speculation", None) or {}).get("rounds", 0)
            one.total_s = last - began
            if one.tokens > 1 and chunks > 1 and one.first_s is not None:
                one.gap_s = (one.total_s - one.first_s) / (one.tokens - 1)
            one.status = "ok"
        except openai.APIStatusError as error:
            one.status = str(error.status_code)
        except openai.OpenAIError as error:
            one.status = type(error).__name__

    def good(self, slo: tuple[float, float]) -> int:
        """How many were answered within the SLO."""
        done = [one for one in self.sent if one.status == "ok" and one.first_s is not None]
        return sum(one.first_s <= slo[0] and (one.gap_s or 0.0) <= slo[1] for one in done)


async def at_rate(load: Load, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Poisson arrivals for `seconds`, then wait for what is open."""
    draw = random.Random(seed)
    began = time.monotonic()
    due, tasks = 0.0, []
    while (due := due + draw.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        one = Sent(due)
        load.sent.append(one)
        tasks.append(asyncio.create_task(load.ask(len(tasks), one)))
    await asyncio.gather(*tasks)
    return {"rate": rate, **summary(load, time.monotonic() - began)}


async def at_concurrency(load: Load, clients: int, seconds: float) -> dict[str, Any]:
    """So many clients, each with one request at a time, for `seconds`."""
    began = time.monotonic()

    async def client() -> None:
        while time.monotonic() - began < seconds:
            one = Sent(time.monotonic() - began)
            load.sent.append(one)
            await load.ask(len(load.sent) - 1, one)

    await asyncio.gather(*(client() for _ in range(clients)))
    return {"concurrency": clients, **summary(load, time.monotonic() - began)}


def summary(load: Load, wall_s: float) -> dict[str, Any]:
    """Numbers of one load; times in milliseconds."""
    done = [one for one in load.sent if one.status == "ok"]
    statuses: dict[str, int] = {}
    for one in load.sent:
        statuses[one.status] = statuses.get(one.status, 0) + 1
    tokens, rounds = sum(one.tokens for one in done), sum(one.rounds for one in done)
    good = [load.good(slo) for slo in load.slo]
    return {
        "requests": len(load.sent),
        "statuses": statuses,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "round_length": tokens / rounds if rounds else None,
        "first_token_ms": percentiles([one.first_s for one in done]),
        "between_tokens_ms": percentiles([one.gap_s for one in done]),
        "request_ms": percentiles([one.total_s for one in done]),
        "slo_s": load.slo,
        "goodput_share": [count / max(1, len(load.sent)) for count in good],
        "goodput_per_s": [count / wall_s for count in good],
    }


def percentiles(seconds: list[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds."""
    known = [value * 1000 for value in seconds if value is not None]
    if not known:
        return None
    return dict(zip(("p50", "p90", "p99"), np.percentile(known, (50, 90, 99)).round(1).tolist(), strict=True))


HEAD = """| load | served | sent | tokens/s | round | first token ms | between tokens ms | good % | good/s | status |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"""


def show(row: dict[str, Any]) -> str:
    """One line of the table; times are p50/p90/p99, goodputs those of each limit between tokens."""

    def times(name: str) -> str:
        found = row[name]
        return f"{found['p50']:.0f}/{found['p90']:.0f}/{found['p99']:.0f}" if found else "-"

    length = f"{row['round_length']:.2f}" if row["round_length"] else "-"
    shares = "/".join(f"{100 * share:.0f}" for share in row["goodput_share"])
    rates = "/".join(f"{rate:.2f}" for rate in row["goodput_per_s"])
    return (
        f"| {load_name(row)} | {row['served']} | {row['requests']} | {row['tokens_per_s']:.1f} | {length} | "
        f"{times('first_token_ms')} | {times('between_tokens_ms')} | {shares} | {rates} | {row['statuses']} |"
    )


def load_name(row: dict[str, Any]) -> str:
    return f"{row['rate']:g}/s" if "rate" in row else f"{row['concurrency']} clients"


def ratios(rows: list[dict[str, Any]]) -> str:
    """What is served, over the first that is served, at each load: above 1 is better in every column."""
    base, *others = dict.fromkeys(row["served"] for row in rows)
    lines = [
        f"\nTimes better than {base} (medians; above 1 is better)\n",
        "| load | served | first token | between tokens | tokens/s | good/s |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    found = {(load_name(row), row["served"]): row for row in rows}

    def over(one: float | None, other: float | None) -> str:
        return f"{one / other:.2f}" if one is not None and other else "-"

    for load in dict.fromkeys(map(load_name, rows)):
        for served in others:
            there, here = found[load, base], found[load, served]
            medians = [
                over((there[name] or {}).get("p50"), (here[name] or {}).get("p50"))
                for name in ("first_token_ms", "between_tokens_ms")
            ]
            good = "/".join(map(over, here["goodput_per_s"], there["goodput_per_s"]))
            speed = over(here["tokens_per_s"], there["tokens_per_s"])
            lines.append(f"| {load} | {served} | {' | '.join(medians)} | {speed} | {good} |")
    return "\n".join(lines)


@contextmanager
def serving(width: str, options: list[str], patience_s: float = 240.0) -> Iterator[str]:
    """`cast-ray serve` with a width; its URL, once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "cast_ray.cli", "serve", "--width", width, "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    try:
        until, said = time.monotonic() + patience_s, ""
        while "\n  try " not in said:
            line = process.stderr.readline()
            if not line or time.monotonic() > until:
                raise SystemExit(f"cast-ray serve --width {width} did not start:\n{said}")
            said += line
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)


async def measure(arguments: argparse.Namespace, url: str, served: str) -> list[dict[str, Any]]:
    """Every load on one server."""
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [row.get("prompt") or row["messages"][-1]["content"] for row in map(json.loads, lines)]
    random.Random(arguments.seed).shuffle(prompts)
    key = os.environ.get("OPENAI_API_KEY", "none")
    client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=arguments.timeout)
    model = arguments.model or (await client.models.list()).data[0].id
    slo = [(arguments.slo_first_ms / 1000, between / 1000) for between in arguments.slo_token_ms]

    def load() -> Load:
        return Load(client, model, prompts, arguments.max_tokens, arguments.temperature, slo)

    warm = load()
    await asyncio.gather(*(warm.ask(number, Sent(0.0)) for number in range(arguments.warm_up)))
    rows = []
    for number, value in enumerate(arguments.concurrency or arguments.rates):
        one = load()
        if arguments.concurrency:
            found = await at_concurrency(one, int(value), arguments.seconds)
        else:
            found = await at_rate(one, value, arguments.seconds, arguments.seed + number)
        rows.append({"served": served, **found, "sent": [asdict(sent) for sent in one.sent]})
        print(show(rows[-1]), flush=True)
    return rows


def main(arguments: argparse.Namespace) -> None:
    limits = " or ".join(f"{between:g}" for between in arguments.slo_token_ms)
    print(f"Good: the first token within {arguments.slo_first_ms:g} ms, then at most {limits} ms a token\n\n{HEAD}")
    rows: list[dict[str, Any]] = []
    if arguments.widths is None:
        rows = asyncio.run(measure(arguments, arguments.url, arguments.url))
    else:
        for width in arguments.widths.split(","):
            with serving(width, arguments.serve) as url:
                rows += asyncio.run(measure(arguments, url, width))
        print(ratios(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"settings": vars(arguments), "loads": rows}, indent=1))


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--widths", help="start servers with these widths, with commas between, instead of --url")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--prompts", default=str(OWN), help="JSONL with prompt or messages")
    parser.add_argument("--rates", type=numbers, default=[0.25, 0.5, 1.0], help="requests a second")
    parser.add_argument("--concurrency", type=numbers, help="clients, instead of rates")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=2, help="requests before the first load")
    parser.add_argument("--slo-first-ms", type=float, default=2000)
    parser.add_argument("--slo-token-ms", type=numbers, default=[50.0, 100.0, 200.0], help="one or several")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", help="write everything here, every request included")
    parser.add_argument("serve", nargs="*", metavar="-- OPTIONS", help="of cast-ray serve, with --widths")
    main(parser.parse_args())
