"""How a round's requests emit: nobody pays for what another asks, and nothing is learnt of what no drafter drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cast_ray.engine import emission as module
from cast_ray.engine.emission import Emission
from cast_ray.engine.sequence import Sequence
from cast_ray.models.flatten import Flattened, Roots, flatten_trees
from cast_ray.models.graph_safety import Watch
from cast_ray.request import SamplingParams
from cast_ray.sampling.choice import LabelGrammar, LabelTree
from cast_ray.sampling.emitting import Emitting
from cast_ray.sampling.keyed import perturbed_scores
from cast_ray.trees.accept import Accepted
from cast_ray.trees.edit import set_aside
from cast_ray.trees.pack import DraftScores
from cast_ray.trees.tree import CandidateTree
from tests.slow_sampling import slow_process

VOCAB, END, PROMPT = 12, 9, [4, 5, 6]
CPU = torch.device("cpu")
LABELS = LabelTree({"a": [1, 2], "b": [1, 3], "c": [5]}, [END])


def request(special: bool = True, seed: int = 0, **params: Any) -> Sequence:
    said = SamplingParams(max_tokens=20, **params)
    grammar = LabelGrammar(LABELS) if said.choice else None
    emitting = Emitting(said, len(PROMPT), [END], (), grammar) if special else None
    return Sequence("r", list(PROMPT), len(PROMPT), said, seed, frozenset({END}), 23, emitting=emitting)


def tree(batch: int) -> CandidateTree:
    """Two branches of two below each root."""
    row = torch.tensor([[1, 2, 3, 4]]).expand(batch, 4)
    parents = torch.tensor([[-1, -1, 0, 1]]).expand(batch, 4)
    depths = torch.tensor([[1, 1, 2, 2]]).expand(batch, 4)
    masses = torch.tensor([[0.6, 0.3, 0.2, 0.1]]).expand(batch, 4)
    return CandidateTree(row, parents, depths, masses, torch.full((batch,), 4), max_depth=2)


PATHS = [[], [1], [2], [1, 3], [2, 4]]


def rows_of(requests: list[Sequence], packed: CandidateTree, widths: list[int]) -> Flattened:
    lengths = [len(r.tokens) - 1 for r in requests]
    tables = torch.arange(len(requests) * 16).view(len(requests), 16)
    roots = Roots(torch.tensor([r.tokens[-1] for r in requests]), torch.tensor(lengths), lengths, tables)
    return flatten_trees(roots, packed, widths, 4, 63)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 2


def test_a_batch_that_asks_for_nothing_makes_no_rules_and_touches_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("work for what nobody asked")

    for name in ("RuleBatch", "Paths", "_paths", "read", "replace", "apply_bits"):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(Emission, "_marked", never)
    for temperature in (0.0, 0.7):
        requests = [request(special=False, temperature=temperature, seed=i) for i in range(3)]
        emission, packed = Emission(requests, VOCAB, CPU), tree(3)
        assert emission.draftable
        assert emission.foreign is None
        scores = DraftScores(torch.zeros(3, 2, 2), torch.zeros(3, 2, 2, dtype=torch.int64))
        assert emission.shape(scores, torch.tensor([2, 2, 2])) is scores
        assert emission.constrain(packed, 9) is packed
        chosen = torch.tensor([4, 4, 4])
        assert emission.widen(chosen) is chosen
        assert emission.widen(None) is None
        rows = rows_of(requests, packed, [4, 4, 4])
        logits = logits_of(15)
        emitted = emission.emit(logits, rows, packed, [4, 4, 4]).tokens
        temperatures = torch.full((15,), temperature)
        expected = perturbed_scores(logits, temperatures, torch.arange(3).repeat_interleave(5), rows.positions + 1)
        assert torch.equal(emitted, expected.argmax(dim=1))
        accepted = Accepted(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3), torch.zeros(3, 1))
        assert not emission.scores.find(logits, rows.starts, accepted, fixed=False)
        emission.scores.tell({}, [[1], [1], [1]])
        emission.learn_labels(logits, [4, 4, 4])


@pytest.mark.parametrize("fixed", [False, True])
def test_every_row_of_a_mixed_batch_emits_as_its_request_says(fixed: bool) -> None:
    said: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"repetition_penalty": 1.8, "presence_penalty": 0.7},
        {"temperature": 1.1, "top_k": 3, "logit_bias": {2: 3.0}},
        {"min_tokens": 2, "logit_bias": {END: 50.0}},
    ]
    requests = [request(special=i > 1, seed=i, **params) for i, params in enumerate(said)]
    widths = [4, 2, 4, 3, 4]
    packed = tree(5)
    rows = rows_of(requests, packed, widths)
    logits = logits_of(sum(widths) + 5)
    before = logits.clone()
    emission = Emission(requests, VOCAB, CPU, fixed=fixed)
    with Watch() as watch:
        emitted = emission.emit(logits, rows, packed, widths).tokens
    assert not fixed or not watch.reads
    assert not fixed or not watch.uploads
    assert torch.equal(logits, before), "they are the target's own, and reported as such"
    at = 0
    for b, width in enumerate(widths):
        for path in PATHS[: width + 1]:
            context = PROMPT + path
            values = slow_process(logits[at], requests[b].params, context, len(PROMPT), (), [END])
            warmth, seed = torch.tensor([requests[b].params.temperature]), torch.tensor([b])
            expected = perturbed_scores(values[None], warmth, seed, torch.tensor([len(context)])).argmax()
            assert int(emitted[at]) == int(expected), f"request {b} behind {path}"
            at += 1


def test_labels_replace_what_was_drafted_and_are_known_to_be_foreign() -> None:
    requests = [request(special=False), request(choice=("a", "b", "c"), choice_probabilities=True)]
    emission = Emission(requests, VOCAB, CPU)
    assert emission.draftable
    packed = emission.constrain(tree(2), 8)
    assert packed.tokens[0, :4].tolist() == [1, 2, 3, 4]
    assert sorted(packed.tokens[1, :4].tolist()) == [1, 2, 3, 5]
    assert emission.foreign is not None
    assert emission.foreign.tolist() == [False, True]
    chosen = emission.widen(torch.tensor([2, 0]))
    assert chosen is not None
    assert chosen.tolist() == [2, 4], "all labels are to be known"
    rows = rows_of(requests, packed, [2, 4])
    emitted = emission.emit(logits_of(8), rows, packed, [2, 4]).tokens
    assert int(emitted[3]) in (1, 5)
    alone = Emission(requests[1:], VOCAB, CPU)
    assert not alone.draftable, "no drafter knows more of the labels than their tree"


def test_what_is_set_aside_looks_as_if_it_had_had_no_candidates() -> None:
    packed, widths = tree(2), torch.tensor([3, 4])
    accepted = Accepted(
        torch.tensor([[0, 1, 3], [0, 2, 4]]), torch.tensor([3, 3]), torch.zeros(2, 3, dtype=torch.int64)
    )
    bare, seen, path = set_aside(torch.tensor([False, True]), packed, widths, accepted)
    assert bare.counts.tolist() == [4, 0]
    assert torch.equal(bare.masses[0], packed.masses[0])
    assert bare.masses[1].tolist() == [0.0] * 4
    assert seen.tolist() == [3, 0]
    assert path.lengths.tolist() == [3, 1]
    assert path.path.tolist() == [[0, 1, 3], [0, 0, 0]]
    assert packed.counts.tolist() == [4, 4]
