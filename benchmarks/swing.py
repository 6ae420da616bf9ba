"""A load that swings between few and many concurrent requests, under `ar`, `fixed:15` and `joint` in one run.

A phase is a number of requests that start together and get the same number of greedy tokens. One engine serves all
policies, each keeping what it has learnt; they take turns phase by phase, on the same prompts. Rounds that also read
prompts are left out: no policy changes those. Speculation that is switched by a threshold pays at every switch; here
each phase is told apart, so that a loss at a turn would show.

    python benchmarks/swing.py --levels 1,64 --swings 4 --max-tokens 24,12 --json swing.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path

import decode as batch_1
import under_load

from cast_ray import EngineConfig, SamplingParams
from cast_ray.stats.acceptance import drafter_of, record_of
from cast_ray.stats.rounds import decode
from cast_ray.width.latency import LatencyTable
from cast_ray.width.policy import make_policy

POLICIES = ("ar", "fixed:15", "joint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=Path, help="folder of DOMAIN.jsonl; default: as in decode.py")
    parser.add_argument("--levels", default="1,64", help="concurrent requests of the phases, by commas")
    parser.add_argument("--max-tokens", default="24,12", help="tokens of every request of each level")
    parser.add_argument("--swings", type=int, default=4, help="times that the levels are gone through")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    levels = [int(level) for level in options.levels.split(",")]
    tokens = [int(number) for number in options.max_tokens.split(",")]
    if len(tokens) != len(levels):
        parser.error(f"--max-tokens {options.max_tokens}: give one number for each of {len(levels)} levels")
    names = options.policies.split(",")

    config = EngineConfig(target=options.target, drafter=options.drafter, dtype=options.dtype, watch_drafter=False)
    chats = batch_1.read_prompts(options.prompts, -(-sum(levels) * options.swings // 5))
    engine = under_load.engine(config, 640, max(levels), max(tokens))
    prompts = {domain: [p for p in map(engine.render, some) if len(p) < 512] for domain, some in chats.items()}
    work = under_load.batches(prompts, levels, options.swings)
    drafter = drafter_of(engine)
    if drafter is None:
        parser.error(f"--drafter {options.drafter}: a drafter is needed")
    latency = LatencyTable.from_dict(engine.stats()["latency"])
    policies = {
        name: make_policy(
            name,
            block_size=drafter.block_size,
            max_nodes=config.max_nodes,
            latency=latency,
            record=record_of(engine),
        )
        for name in names
    }
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    turn = 0
    for swing in range(options.swings):
        for level, most in zip(levels, tokens, strict=True):
            turn += 1
            for name in itertools.islice(itertools.cycle(names), turn, turn + len(names)):
                params = SamplingParams(max_tokens=most, ignore_eos=True)
                run = decode(engine, policies[name], work[level][swing], params)
                rates[name, level].append(1000 * run.tokens / run.ms)
        print(f"swing {swing + 1} of {options.swings} done", flush=True)

    about = {**batch_1.machine(options), "levels": levels, "max_tokens": tokens, "swings": options.swings}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(table(rates, names, levels))
    if options.json:
        plain = {f"{name} at {level}": values for (name, level), values in rates.items()}
        reports = {name: policy.report() for name, policy in policies.items()}
        options.json.write_text(json.dumps({"about": about, "tokens_per_s": plain, "policies": reports}, indent=1))


def table(rates: dict[tuple[str, int], list[float]], names: list[str], levels: list[int]) -> str:
    """Markdown: tokens a second by level, and `joint` against the others; the first swing, all learning, left out."""
    lines = ["| | " + " | ".join(f"at {level}" for level in levels) + " |", "| --- |" + " ---: |" * len(levels)]
    for name in names:
        medians = (statistics.median(rates[name, level][1:]) for level in levels)
        lines.append(f"| {name}, tokens/s | {' | '.join(f'{rate:.1f}' for rate in medians)} |")
    others = [name for name in names if name != "joint"]
    # Phase by phase: what disturbs the machine for a while disturbs all sides of a phase.
    ratios = {
        level: [rate / max(rates[name, level][swing] for name in others) for swing, rate in enumerate(own)][1:]
        for level, own in ((level, rates["joint", level]) for level in levels)
    }
    for what, pick in (("median phase", statistics.median), ("worst phase", min)):
        cells = (f"{pick(ratios[level]):.2f}x" for level in levels)
        lines.append(f"| joint / better of the others, {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
