"""What a training step is made of: real tokens at real places, chosen by seed and step alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from cast_ray.training.batches import Sequences, channel_scale, draft_vocabulary, make_batch

LENGTHS, PROMPTS, TOP = [9, 5, 30], [4, 3, 10], 2


@pytest.fixture
def sequences(tmp_path: Path) -> Sequences:
    """Token i of a sequence is 100 * its number + i, its feature is its token, its soft ids are token and token + 1."""
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    tokens = torch.cat([100 * n + torch.arange(length) for n, length in enumerate(LENGTHS)])
    answers = torch.cat([100 * n + torch.arange(p, m) for n, (p, m) in enumerate(zip(PROMPTS, LENGTHS, strict=True))])
    tensors = {
        "tokens": tokens.int(),
        "features": tokens[:, None].repeat(1, 3).bfloat16(),
        "soft_ids": torch.stack([answers, answers + 1], dim=1).int(),
        "soft_probs": torch.tensor([0.75, 0.25]).repeat(len(answers), 1).half(),
        "offsets": offsets,
        "prompts": torch.tensor(PROMPTS),
    }
    save_file(tensors, tmp_path / "00000.safetensors")
    return Sequences.of(tmp_path)


def test_blocks_hold_what_came_after_their_root(sequences: Sequences) -> None:
    batch = make_batch([sequences[i] for i in range(3)], anchors=12, size=5, seed=3)
    for s in range(3):
        start, end = PROMPTS[s] - 1, LENGTHS[s] - 1
        assert set(batch.roots[s].tolist()) <= set(range(start, end))
        for a in range(12):
            root = int(batch.roots[s, a])
            assert int(batch.root_tokens[s, a]) == 100 * s + root
            wanted = [100 * s + root + d if root + d < LENGTHS[s] else -1 for d in range(1, 5)]
            assert batch.labels[s, a].tolist() == wanted
            for d, token in enumerate(wanted):
                if token >= 0:
                    assert batch.soft_ids[s, a, d].tolist() == [token, token + 1]
        context = int(batch.roots[s].max())
        assert torch.equal(batch.features[s, :context, 0].float(), (100 * s + torch.arange(context)).bfloat16().float())


def test_anchors_are_all_used_before_any_is_used_again(sequences: Sequences) -> None:
    batch = make_batch([sequences[0]], anchors=12, size=3, seed=0)
    counts = torch.bincount(batch.roots[0])[PROMPTS[0] - 1 :]
    assert counts.max() - counts.min() <= 1


def test_a_step_is_the_same_whenever_it_is_taken_and_an_epoch_holds_every_sequence(sequences: Sequences) -> None:
    first = [[int(s.tokens[0]) for s in sequences.at_step(5, step, 1)] for step in range(6)]
    again = [[int(s.tokens[0]) for s in sequences.at_step(5, step, 1)] for step in reversed(range(6))]
    assert first == again[::-1]
    assert sorted(first[:3]) == sorted(first[3:]) == [[0], [100], [200]]


def test_the_scale_ignores_a_few_giants() -> None:
    features = torch.randn(1000, 4) * torch.tensor([1.0, 10.0, 0.1, 5.0])
    features[0] = 1e4
    torch.testing.assert_close(channel_scale(features), torch.tensor([1.0, 10.0, 0.1, 5.0]), rtol=0.15, atol=0.0)


def test_the_draft_vocabulary_is_what_answers_use_most(tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    rows = [
        {"name": "a", "domain": "d", "prompt_ids": [50, 50, 50], "token_ids": [7, 7, 9, 30], "temperature": 0.0},
        {"name": "b", "domain": "d", "prompt_ids": [50], "token_ids": [9, 9, 31], "temperature": 0.8},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "answers" / "00000.parquet")
    assert draft_vocabulary(tmp_path, 3, 64).tolist() == [7, 9, 30]
    assert draft_vocabulary(tmp_path, 6, 64).tolist() == [0, 1, 7, 9, 30, 31]
    assert draft_vocabulary(tmp_path, 100, 64).tolist() == list(range(64))
