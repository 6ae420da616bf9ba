"""Lookup drafting against plain decoding and a trained drafter, alone and together, in one run on the embedded target.

Tasks: the five domains, a JSON extraction job with one schema (no grammar), a rewrite of misspelt paragraphs,
summaries, free chat, and rows made to mislead lookup. The methods take turns task by task on one loaded target, each
with a width policy (`joint`) and a store of its own, and so with what it learnt. Round length and ms a token are of
decoding; wall seconds are of all, prompts included.

    python benchmarks/lookup.py --quick
    python benchmarks/lookup.py --rows 500 --count 10 --batch 8 --json lookup.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.calibration.profile import device_name
from cast_ray.drafters.lookup import Lookup
from cast_ray.engine.health import DrafterHealth
from cast_ray.request import Completion
from cast_ray.stats.rounds import STALL, Watched
from cast_ray.width.policy import make_policy

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data" / "prompts"
DOMAINS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
METHODS = ("ar", "embedded", "lookup", "embedded+lookup")
COPYING = ("json", "rewrite")

NAMES = (
    "Anna Berg",
    "Tom Miller",
    "Lucia Rossi",
    "Ken Tanaka",
    "Maya Singh",
    "Paul Dubois",
    "Eva Novak",
    "Omar Haddad",
)
CITIES = ("Lisbon", "Oslo", "Vienna", "Osaka", "Toronto", "Nairobi", "Lima", "Prague")
GOODS = ("desk lamp", "garden chair", "coffee grinder", "winter jacket", "bicycle pump", "wool blanket", "wall clock")
PARAGRAPHS = (
    "The library in the old town opens early on weekdays. Students come to read the morning papers, and retired "
    "teachers help them with their homework. In the afternoon the children's corner is full of noise and laughter.",
    "Our boat left the harbour before sunrise. The sea was calm, and a light wind from the west filled the sails. "
    "By noon we could see the island, with its white houses and a lighthouse on the highest hill.",
    "A good loaf of bread needs time more than anything else. Mix flour, water and salt, add a little yeast, and let "
    "the dough rest over night. In the morning fold it gently, shape it, and bake it in a very hot oven.",
    "The committee met on Tuesday to discuss the new bridge. Engineers explained why the old one must be closed in "
    "spring, and shop owners asked how their customers would cross the river while the work goes on.",
    "Wild bees often live alone. They dig small tunnels in dry ground or use the hollow stems of plants. Gardeners can "
    "help them by leaving some corners untouched and by planting flowers that bloom from March to October.",
    "The train between the two cities takes four hours. It follows a narrow valley, crosses eleven bridges and climbs "
    "to a pass where snow lies until June. Many travellers say that it is the finest journey in the country.",
)
CHATS = (
    "What should I think about before I adopt a dog?",
    "I feel tired every afternoon at work. What could help?",
    "Tell me a short story about a clockmaker who could stop time.",
    "Explain to a child why the sky is blue.",
    "Plan a cheap weekend for two in a city by the sea.",
    "Which is better for a beginner, the guitar or the piano, and why?",
)
SCHEMA = (
    "You extract data. Answer with one JSON object only, with exactly these keys: "
    '{"customer": string, "city": string, "product": string, "quantity": number, "price_each": number, '
    '"express": boolean}'
)


def extraction(rows: int) -> list[Any]:
    """Orders in words; the answer to each is JSON of one schema."""
    rng = random.Random(0)
    found = []
    for number in range(rows):
        name, city, good = rng.choice(NAMES), rng.choice(CITIES), rng.choice(GOODS)
        count, price, express = rng.randrange(1, 9), rng.randrange(500, 9000) / 100, rng.random() < 0.5
        text = (
            f"Order {1000 + number}: {name} from {city} would like {count} of the {good} at {price:.2f} each, "
            f"{'with express delivery' if express else 'with normal delivery'}."
        )
        found.append([{"role": "system", "content": SCHEMA}, {"role": "user", "content": text}])
    return found


def misspelt(text: str, rng: random.Random) -> str:
    """The text with a letter doubled, dropped or swapped in one word of six."""
    words = text.split(" ")
    for place, word in enumerate(words):
        if len(word) > 4 and rng.random() < 1 / 6:
            cut = rng.randrange(1, len(word) - 2)
            change = rng.choice((word[cut] * 2, "", word[cut + 1] + word[cut]))
            words[place] = word[:cut] + change + word[cut + (2 if len(change) == 2 and change[0] != change[1] else 1) :]
    return " ".join(words)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tasks(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Prompts by task: chats, and token ids for the rows that are to mislead."""
    rng, count = random.Random(1), options.count
    found: dict[str, list[Any]] = {}
    for name in DOMAINS:
        lines = (SHARED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count] if SHARED.is_dir() else []
        if lines:
            found[name] = [json.loads(line)["messages"] for line in lines]
    found["json"] = extraction(options.rows)
    found["rewrite"] = [
        user(f"Correct the spelling of this paragraph:\n\n{misspelt(t, rng)}") for t in _some(PARAGRAPHS, count)
    ]
    found["summary"] = [user(f"Summarise this in one sentence:\n\n{text}") for text in _some(PARAGRAPHS, count)]
    found["chat"] = [user(text) for text in _some(CHATS, count)]
    # Random tokens; one token again and again; the beginning of one text with other endings.
    shared = [rng.randrange(1000, 30_000) for _ in range(40)]
    found["adversarial"] = [
        rows
        for _ in range(max(1, count // 3))
        for rows in (
            [rng.randrange(1000, 30_000) for _ in range(80)],
            [rng.randrange(1000, 30_000)] * 80,
            [*shared, *(rng.randrange(1000, 30_000) for _ in range(3))] * 2,
        )
    ]
    return found


def _some(texts: Sequence[str], count: int) -> list[str]:
    return [texts[i % len(texts)] for i in range(count)]


@dataclass
class Figures:
    """One method on one task."""

    round_length: float
    ms_a_token: float
    wall_s: float
    tokens: int
    lookup_ms_a_round: float
    round_ms: float
    accepted_by_source: dict[str, int]


class Decoder:
    """One method on a loaded engine: which of its parts it uses, and the policy that learns of just that."""

    def __init__(self, engine: Engine, method: str) -> None:
        parts, config = engine._parts, engine.config
        lookup = Lookup(config.max_batch_size, parts.max_context, config.lookup_tokens)
        self._engine = engine
        self._parts = replace(
            parts,
            drafter=parts.drafter if "embedded" in method else None,
            lookup=lookup if "lookup" in method else None,
        )
        width = "ar" if method == "ar" else "joint"
        record = parts.record if "embedded" in method else None
        self._policy = make_policy(
            width, block_size=8, max_nodes=config.max_nodes, latency=parts.latency, record=record
        )
        self._health = DrafterHealth(method, record) if "embedded" in method else None

    def watch(self) -> Watched:
        """From now on the engine decodes by this method, and is watched."""
        watched = Watched(self._policy)
        self._engine._parts = self._parts
        self._engine.use_policy(watched, health=self._health)
        return watched


def decode(
    engine: Engine, decoder: Decoder, task: str, prompts: list[Any], params: SamplingParams
) -> tuple[Figures, list[list[int]]]:
    """All prompts through the engine, at most its batch at once; the job is a lookup scope of its own."""
    watched = decoder.watch()
    before = engine.stats()
    for number, prompt in enumerate(prompts):
        engine.submit(f"{task}-{number}", prompt, params, lookup_scope=task)
    done: dict[str, Completion] = {}
    began = time.perf_counter()
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    wall = time.perf_counter() - began
    after = engine.stats()
    pure = [times for times in watched.times if not times.shape.chunk_tokens] or watched.times
    ms = np.array([times.total_ms for times in pure])
    kept = np.minimum(ms, STALL * np.median(ms))
    rounds = len(watched.times)
    sources = {k: v - before["accepted_by_source"][k] for k, v in after["accepted_by_source"].items()}
    outputs = [done[f"{task}-{number}"].token_ids for number in range(len(prompts))]
    figures = Figures(
        round_length=sum(times.committed for times in watched.times)
        / sum(times.shape.batch for times in watched.times),
        ms_a_token=float(kept.sum()) / sum(times.committed for times in pure),
        wall_s=wall,
        tokens=sum(map(len, outputs)),
        lookup_ms_a_round=(after["host"]["lookup"] - before["host"]["lookup"]) / rounds,
        round_ms=float(ms.mean()),
        accepted_by_source={name: count for name, count in sources.items() if count},
    )
    return figures, outputs


def table(found: dict[str, dict[str, Figures]], field: str, form: str) -> str:
    """One figure of all tasks and methods, as Markdown."""
    methods = list(next(iter(found.values())))
    lines = [f"| task | {' | '.join(methods)} |", f"| --- |{' ---: |' * len(methods)}"]
    for task, row in found.items():
        lines.append(f"| {task} | {' | '.join(format(getattr(row[m], field), form) for m in methods)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500, help="rows of the extraction job")
    parser.add_argument("--count", type=int, default=6, help="prompts of every other task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4, help="requests decoded together")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", help="tasks, separated by commas; default: all")
    parser.add_argument("--quick", action="store_true", help="a few rows of each task: some minutes on two slow cores")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.count, options.max_tokens = min(options.rows, 24), 3, 64
    profiles = tempfile.mkdtemp(prefix="lookup-profile-")
    engine = Engine(
        EngineConfig(
            drafter="embedded+lookup",
            dtype=options.dtype,
            threads=options.threads,
            max_batch_size=options.batch,
            # Measured anew: a profile of another hour may be of a busier machine.
            profile_dir=Path(profiles),
            probe_seconds=60.0,
            kv_cache_tokens=options.batch * 2048,
            # Pages that one method filled would hold nothing for another one's drafter.
            prefix_cache=False,
        )
    )
    decoders = {method: Decoder(engine, method) for method in METHODS}
    params = SamplingParams(max_tokens=options.max_tokens)
    chosen = {t: p for t, p in tasks(options).items() if not options.only or t in options.only.split(",")}
    for decoder in decoders.values():  # caches, and what the policies learn first
        texts = ("Name five rivers.", "Count from one to twenty.", "What is a lake?", "Tell me about bread.")
        decode(engine, decoder, "warm-up", [user(text) for text in texts], params)

    found: dict[str, dict[str, Figures]] = {}
    parted = 0
    for task, prompts in chosen.items():
        found[task], outputs = {}, {}
        for name, decoder in decoders.items():
            found[task][name], outputs[name] = decode(engine, decoder, task, prompts, params)
            parted += sum(ours != plain for ours, plain in zip(outputs[name], outputs["ar"], strict=True))
        row = found[task]
        print(
            f"{task:12} " + "  ".join(f"{m}: R {f.round_length:.2f}, {f.ms_a_token:.1f} ms" for m, f in row.items()),
            flush=True,
        )

    print(f"\nRound length, tokens\n\n{table(found, 'round_length', '.2f')}")
    print(f"\nms a token\n\n{table(found, 'ms_a_token', '.1f')}")
    both = {task: row["embedded+lookup"] for task, row in found.items()}
    print("\nembedded+lookup against the better of its parts (time), and its round length against embedded's")
    ratios = {}
    for task, row in found.items():
        better = min(row["embedded"].ms_a_token, row["lookup"].ms_a_token)
        ratios[task] = (better / both[task].ms_a_token, both[task].round_length / row["embedded"].round_length)
        print(f"  {task:12} {ratios[task][0]:.2f}x  {ratios[task][1]:.2f}x" + ("  (copies)" if task in COPYING else ""))
    cost = [(row["lookup"].lookup_ms_a_round, row["lookup"].round_ms) for row in found.values()]
    print(f"\nlookup's own time, a round: {', '.join(f'{a:.2f} of {b:.1f} ms ({a / b:.1%})' for a, b in cost)}")
    if "adversarial" in found:
        row = found["adversarial"]
        print(f"adversarial rows against ar: {row['lookup'].ms_a_token / row['ar'].ms_a_token:.2f} of its time a token")
    print(f"outputs that part from plain decoding (ties of rounding): {parted}")
    if options.json:
        device = {"name": device_name(engine.device), "threads": torch.get_num_threads(), "machine": platform.machine()}
        figures = {task: {name: asdict(one) for name, one in row.items()} for task, row in found.items()}
        said = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(
            json.dumps({"device": device, "options": said, "tasks": figures, "ratios": ratios}, indent=1)
        )


if __name__ == "__main__":
    main()
