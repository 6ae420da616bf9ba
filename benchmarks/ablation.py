"""What each choice in a drafter's training gives: short runs from random weights that differ in one thing.

    python benchmarks/ablation.py run --work WORK --seconds 60 --to ablation.json      # all, or --only base,block-4
    python benchmarks/ablation.py table ablation.json

WORK is a work folder of `cast-ray train-drafter` whose answers and features are there; it is only read. Every run gets
the same CPU time of one thread, so that what makes a step dearer pays for it, and is then tried on held-out answers of
greedy decoding: how many tokens a round would have committed, given the target's own text so far, with the top-1 chain
and with trees of 7 and 31 nodes. Runs that the JSON has already are not repeated.

Such runs take minutes where a drafter worth shipping takes hours: they tell what learns fast, not what ends best.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cast_ray.drafters.checkpoint import DFlashConfig, read_config
from cast_ray.models.fused import speed_up
from cast_ray.models.loading import LoadedTarget, load_target
from cast_ray.models.target import ATTENTION_NAME
from cast_ray.request import derive_seed
from cast_ray.training import muon
from cast_ray.training.answers import read_answers
from cast_ray.training.batches import Sequences, draft_vocabulary, make_batch
from cast_ray.training.config import TrainConfig
from cast_ray.training.drafter_config import drafter_config, lent
from cast_ray.training.features import TrainingSequence, write_features
from cast_ray.training.files import read_json, write_json
from cast_ray.training.loop import Frozen, draft_hidden, fresh_state, train_step
from cast_ray.training.shards import Answer
from cast_ray.training.state import TrainingState, rate_factor
from cast_ray.trees.pack import DraftScores, pack, pack_chain
from cast_ray.trees.tree import CandidateTree

WIDTHS = (7, 31)
# Held-out answers that a run is tried on, and places in each.
TRIED, PLACES = 64, 24
# Shards of answers that are read again for other tapped layers.
SHARDS = 3
BASE: dict[str, Any] = {
    "architecture": "dflash2",
    "layers": 3,
    "block_size": 8,
    "sequences": 2,
    "anchors": 32,
    "warmup": 10,
    "learning_rate": 5e-3,
    "depth_decay": 6.0,
    "soft_weight": 0.7,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
}


@dataclass(frozen=True)
class Variant:
    """One run. changes: to BASE; answers: how many it may see (0: all); rows: Muon's block of rows; adam: instead of
    Muon, at this learning rate."""

    name: str
    about: str
    changes: dict[str, Any] = field(default_factory=dict)
    answers: int = 0
    rows: int = muon.BLOCK_ROWS
    adam: float = 0.0


VARIANTS = [
    Variant("base", "DFlash 2, 3 layers, block 8, 2 answers x 32 blocks, Muon 0.005, decay 6, 0.7 soft, five taps"),
    Variant("base-again", "the same with another seed: how far luck goes", {"seed": 1}),
    Variant("layers-1", "1 layer", {"layers": 1}),
    Variant("layers-2", "2 layers", {"layers": 2}),
    Variant("layers-5", "5 layers", {"layers": 5}),
    Variant("block-4", "block 4", {"block_size": 4}),
    Variant("block-16", "block 16", {"block_size": 16}),
    Variant("hard", "hard targets only", {"soft_weight": 0.0}),
    Variant("soft", "soft targets only", {"soft_weight": 1.0}),
    Variant("decay-2", "decay over depth 2", {"depth_decay": 2.0}),
    Variant("decay-4", "decay over depth 4", {"depth_decay": 4.0}),
    Variant("decay-none", "no decay over depth", {"depth_decay": 1e6}),
    Variant("rate-0.002", "learning rate 0.002", {"learning_rate": 2e-3}),
    Variant("rate-0.01", "learning rate 0.01", {"learning_rate": 1e-2}),
    Variant("rate-0.02", "learning rate 0.02", {"learning_rate": 2e-2}),
    Variant("1x64", "1 answer x 64 blocks", {"sequences": 1, "anchors": 64}),
    Variant("4x16", "4 answers x 16 blocks", {"sequences": 4, "anchors": 16}),
    Variant("2x16", "2 answers x 16 blocks: more, smaller steps", {"anchors": 16}),
    Variant("4x64", "4 answers x 64 blocks: fewer, larger steps", {"sequences": 4, "anchors": 64}),
    Variant("last-tap", "layer 27 alone", {"taps": (27,)}),
    Variant("three-taps", "layers 14, 20, 27", {"taps": (14, 20, 27)}),
    Variant("deep-taps", "layers 2, 9, 16, 23, 29", {"taps": (2, 9, 16, 23, 29)}),
    Variant("few-answers", "only 32 answers, again and again", answers=32),
    Variant("dflash", "DFlash", {"architecture": "dflash"}),
    Variant("causal", "DFlash 2, causal inside the block", {"causal": True}),
    Variant("vocab-4096", "draft vocabulary of 4,096", {"draft_vocab": 4096}),
    Variant("muon-whole", "Muon over whole matrices", rows=1 << 20),
    Variant("muon-64", "Muon by blocks of 64 rows", rows=64),
    Variant("adamw", "AdamW at 0.001 for all", adam=1e-3),
]


class Chosen(Sequences):
    """The first `count` sequences of a folder (0: all), with the given columns of their features (None: all)."""

    def __init__(self, folder: Path, count: int = 0, columns: Tensor | None = None) -> None:
        self._all, self._columns = Sequences.of(folder), columns
        self._count = min(count or len(self._all), len(self._all))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> TrainingSequence:
        item = self._all[number]
        if self._columns is not None:
            item.features = item.features[:, self._columns]
        return item


class Bench:
    """What all runs share: the target, the answers, and where features of other layers are kept."""

    def __init__(self, work: Path, target: str, scratch: Path) -> None:
        self.work, self.scratch = work, scratch
        self.loaded: LoadedTarget = load_target(
            target, torch.float32, torch.device("cpu"), attn_implementation=ATTENTION_NAME
        )
        self.embedding, self.head = lent(self.loaded)
        self.taps: list[int] = read_json(work / "features" / "settings.json")["taps"]
        self.seen = {token for _, part in read_answers(work) for a in part for token in (*a.prompt_ids, *a.token_ids)}

    def run(self, variant: Variant, seconds: float) -> dict[str, Any]:
        """Train for `seconds` of CPU time and try the result."""
        config = TrainConfig(**{"work": self.work, **BASE, **variant.changes})
        draft = self._draft(config)
        learn, unseen = self._sequences(list(draft.taps), variant.answers)
        muon.BLOCK_ROWS = variant.rows
        state = fresh_state(config, draft, learn, self.embedding, torch.device("cpu"))
        if variant.adam:
            state.optimisers = [torch.optim.AdamW(state.network.parameters(), lr=variant.adam, betas=(0.9, 0.95))]
        vocabulary = draft_vocabulary(self.work, config.draft_vocab, self.embedding.shape[0])
        frozen = Frozen.of(self.embedding, self.head, vocabulary, torch.float32)
        began, progress = time.process_time(), 0.0
        while progress < 1.0:
            factor = rate_factor(state.step, config.warmup, progress, config.decay_share)
            scores = train_step(config, draft, state, learn, frozen, torch.float32, factor)
            state.step += 1
            progress = (time.process_time() - began) / seconds
        return {
            "about": variant.about,
            "settings": asdict(variant),
            "steps": state.step,
            "seconds": time.process_time() - began,
            "loss": scores.loss,
            "round_length": round_lengths(config, draft, state, unseen, frozen),
        }

    def _draft(self, config: TrainConfig) -> DFlashConfig:
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / "config.json", drafter_config(config, self.loaded, self.seen))
            return read_config(Path(folder))

    def _sequences(self, taps: list[int], count: int) -> tuple[Sequences, Sequences]:
        """To learn from, and to be tried on. Features of layers that WORK has not are computed for some answers."""
        names = ("features", "held_out_features")
        if set(taps) <= set(self.taps):
            width = self.embedding.shape[1]
            columns = torch.cat([torch.arange(width) + self.taps.index(tap) * width for tap in taps])
            chosen = None if taps == self.taps else columns
            learn, unseen = (Chosen(self.work / name, count, chosen) for name in names)
            return learn, unseen
        held_out = list(read_answers(self.work, "held_out"))
        greedy = [(number, [answer for answer in part if not answer.temperature]) for number, part in held_out]
        folder = self.scratch / "-".join(map(str, taps))
        for name, shards in zip(names, (list(read_answers(self.work))[:SHARDS], greedy), strict=True):
            self._write(tuple(taps), shards, folder / name)
        return Chosen(folder / names[0], count), Chosen(folder / names[1])

    def _write(self, taps: tuple[int, ...], shards: list[tuple[int, list[Answer]]], folder: Path) -> None:
        speed_up(self.loaded.model)
        write_features(
            self.loaded, taps, shards, folder, top=24, max_tokens=10**9, report=lambda *progress: print(*progress)
        )


@torch.inference_mode()
def round_lengths(
    config: TrainConfig, draft: DFlashConfig, state: TrainingState, unseen: Sequences, frozen: Frozen
) -> dict[str, float]:
    """Mean tokens that a round commits at random places of held-out answers: by the chain, and by trees."""
    found: dict[str, list[Tensor]] = {}
    for number in range(min(TRIED, len(unseen))):
        batch = make_batch([unseen[number]], PLACES, draft.block_size, derive_seed(0, "tried", number))
        hidden = draft_hidden(draft, state, batch, frozen, torch.float32).flatten(0, 1)
        scores = draft_scores(state.network, hidden, batch.root_tokens.flatten(), frozen)
        labels = batch.labels.flatten(0, 1)
        trees = {"chain": pack_chain(scores, draft.block_size - 1), **{str(n): pack(scores, n) for n in WIDTHS}}
        for name, tree in trees.items():
            found.setdefault(name, []).append(1.0 + accepted(tree, labels).float())
    return {name: float(torch.cat(parts).mean()) for name, parts in found.items()}


def draft_scores(network: nn.Module, hidden: Tensor, roots: Tensor, frozen: Frozen) -> DraftScores:
    """What the drafter proposes. hidden: `[n, D, H]`; roots: `[n]` tokens."""
    logits = (hidden @ frozen.head.T).float()
    selector: Any = network.candidate_selector
    best, rows = logits.topk(selector.top_k if selector else 32, dim=-1)
    if selector:
        return selector.scores(hidden, best, frozen.vocabulary[rows], roots, torch.ones(len(roots)))
    return DraftScores(best - logits.logsumexp(dim=-1, keepdim=True), frozen.vocabulary[rows])


def accepted(tree: CandidateTree, labels: Tensor) -> Tensor:
    """Nodes of each tree that lie on the path of the labels `[n, D]` (-1: the text ended), `[n]` int64."""
    places = (tree.depths - 1).clamp(min=0)
    agrees = (tree.depths > 0) & (tree.tokens == labels.gather(1, places))
    agrees = nn.functional.pad(agrees, (1, 0), value=True)
    on_path = agrees
    for _ in range(tree.max_depth):
        on_path = on_path & nn.functional.pad(on_path.gather(1, tree.parents + 1), (1, 0), value=True)
    return on_path.sum(dim=1) - 1


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| run | steps | chain | 7 nodes | 31 nodes |", "| --- | ---: | ---: | ---: | ---: |"]
    for run in found.values():
        lengths = " | ".join(f"{value:.3f}" for value in run["round_length"].values())
        lines.append(f"| {run['about']} | {run['steps']} | {lengths} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="train and try")
    one.add_argument("--work", type=Path, required=True)
    one.add_argument("--target", default="embedded")
    one.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of a run")
    one.add_argument("--only", default="", help="names with commas; default: all")
    one.add_argument("--scratch", type=Path, default=Path("ablation-features"), help="features of other layers")
    one.add_argument("--to", type=Path, required=True)
    two = commands.add_parser("table", help="print what was found")
    two.add_argument("found", type=Path)
    asked = parser.parse_args()
    if asked.command == "run":
        known = {variant.name for variant in VARIANTS}
        names = asked.only.split(",") if asked.only else sorted(known)
        if strange := set(names) - known:
            parser.error(f"--only {','.join(sorted(strange))} is no run. There are {', '.join(sorted(known))}")
        torch.set_num_threads(1)
        bench = Bench(asked.work, asked.target, asked.scratch)
        for variant in VARIANTS:
            found = read_json(asked.to) or {}
            if variant.name in names and variant.name not in found:
                found[variant.name] = bench.run(variant, asked.seconds)
                write_json(asked.to, found)
                print(variant.name, found[variant.name]["steps"], found[variant.name]["round_length"], flush=True)
    print(table(read_json(asked.to if asked.command == "run" else asked.found)))


if __name__ == "__main__":
    main()
