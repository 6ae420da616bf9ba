"""What a grammar lets come after every node of a tree is what it lets come after the same tokens one by one."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from cast_ray.errors import RequestError
from cast_ray.request import SamplingParams
from cast_ray.sampling.choice import LabelTree
from cast_ray.sampling.grammar import Grammar, GrammarCompiler, apply_bits
from cast_ray.trees.edit import Nodes, heaviest
from tests.byte_tokenizer import byte_level

TOKENIZER = byte_level()
VOCAB = len(TOKENIZER) + 5  # models have more embeddings than their tokenizers have tokens
END = TOKENIZER.eos_token_id
SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":4},"size":{"enum":["s","m"]}},'
    '"required":["name","size"],"additionalProperties":false}'
)
FORMS: list[dict[str, Any]] = [
    {"choice": ["yes", "yes, sir", "no", "é"]},
    {"regex": r"[a-c]{2,4}(, [0-9]+)?"},
    {"json_schema": SCHEMA},
    {"json_object": True},
]


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, [END])


def allowed(grammar: Grammar, nodes: Nodes | None = None) -> torch.Tensor:
    """[nodes + 1, vocab] bool."""
    nodes = nodes or Nodes([], [], [])
    mask = np.zeros((len(nodes) + 1, -(-VOCAB // 32)), dtype=np.int32)
    grammar.fill(nodes, mask)
    logits = torch.zeros(len(nodes) + 1, VOCAB)
    apply_bits(logits, mask)
    return logits == 0


def draft(grammar: Grammar, rng: random.Random) -> Nodes:
    """A tree of which most is permitted and some is not."""
    tokens, parents, masses = [], [], []
    for node in range(30):
        parent = rng.randrange(-1, node) if node else -1
        tokens.append(rng.choice([rng.randrange(VOCAB), *TOKENIZER('abc, 1{"yes name no')["input_ids"], END]))
        parents.append(parent)
        masses.append((1.0 if parent < 0 else masses[parent]) * rng.random())
    for _ in range(2):
        row = allowed(grammar).nonzero()[:, 1].tolist()
        tokens.append(rng.choice(row))
        parents.append(-1)
        masses.append(0.1)
    return heaviest(Nodes(tokens, parents, masses), len(tokens))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_masks_over_a_tree_are_those_of_walking_there(form: dict[str, Any]) -> None:
    rng = random.Random(5)
    compile_form = compiler()
    for _ in range(6):
        params = SamplingParams(**form)
        grammar = compile_form.compile(params)
        assert grammar is not None
        path: list[int] = []
        for _ in range(12):
            drafted = draft(grammar, rng)
            nodes = grammar.candidates(drafted, 20)
            assert len(nodes) <= 20
            assert nodes.masses == sorted(nodes.masses, reverse=True)
            rows = allowed(grammar, nodes)
            for place in range(len(nodes)):
                above = nodes.parents[place]
                assert above < place
                assert rows[above + 1, nodes.tokens[place]], "a forbidden candidate is kept"
                walked = compile_form.compile(params)
                assert walked is not None
                prefix, at = [], place
                while at >= 0:
                    prefix.insert(0, nodes.tokens[at])
                    at = nodes.parents[at]
                if walked.advance([*path, *prefix]) == len(path) + len(prefix) and not walked.finished:
                    assert torch.equal(allowed(walked)[0], rows[place + 1])
            # The tree has not moved it; what is emitted does.
            token = rng.choice(rows[0].nonzero()[:, 0].tolist())
            assert grammar.advance([token]) == 1
            path.append(token)
            if grammar.finished:
                break
        assert grammar.error is None


def test_tokens_behind_the_end_do_not_belong_to_the_output() -> None:
    for form, text in (({"choice": ["yes", "no"]}, "no"), ({"regex": "ab?"}, "ab"), ({"json_object": True}, "{}")):
        grammar = compiler().compile(SamplingParams(**form))
        assert grammar is not None
        ids = TOKENIZER(text)["input_ids"]
        assert grammar.advance([*ids, END, 5]) == len(ids)
        assert grammar.finished


def test_a_label_that_begins_another_ends_with_the_end_token() -> None:
    grammar = compiler().compile(SamplingParams(choice=["no", "no way"]))
    assert grammar is not None
    ids = TOKENIZER("no")["input_ids"]
    assert grammar.advance(ids) == len(ids)
    assert not grammar.finished
    row = allowed(grammar)[0].nonzero()[:, 0].tolist()
    assert sorted(row) == sorted([END, TOKENIZER(" way")["input_ids"][0]])
    assert grammar.advance([END, 3]) == 1


def test_what_a_grammar_forces_is_foreseen_without_a_drafter() -> None:
    nothing = Nodes([], [], [])
    grammar = compiler().compile(SamplingParams(regex="name: [0-9]+"))
    assert grammar is not None
    nodes = grammar.candidates(nothing, 9)
    assert TOKENIZER.decode(nodes.tokens) == "name: "
    assert nodes.masses == [1.0] * len(nodes)
    assert len(grammar.candidates(nothing, 2)) == 2
    labels = compiler().compile(SamplingParams(choice=["yes", "no", "nay"]))
    assert labels is not None
    nodes = labels.candidates(nothing, 99)
    spelled = [TOKENIZER(label)["input_ids"] for label in ("yes", "no", "nay")]
    assert len(nodes) == len({tuple(ids[: i + 1]) for ids in spelled for i in range(len(ids))})


def test_label_probabilities_are_those_of_a_direct_computation() -> None:
    labels = {"a": [1, 2], "b": [1, 3], "c": [4], "d": [4, 5, 6], "e": [7]}
    tree = LabelTree(labels, [0])
    nodes = tree.candidates(0, 99)
    assert len(nodes) == len(tree) == 7
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(nodes) + 1, 9, generator=generator)
    # The same logits by prefix, however the nodes lie.
    by_prefix: dict[tuple[int, ...], torch.Tensor] = {(): logits[0].double().softmax(0)}
    paths: list[tuple[int, ...]] = []
    for place, (token, parent) in enumerate(zip(nodes.tokens, nodes.parents, strict=True)):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        by_prefix[paths[-1]] = logits[place + 1].double().softmax(0)

    def chance(tokens: list[int]) -> float:
        return math.prod(float(by_prefix[tuple(tokens[:i])][token]) for i, token in enumerate(tokens))

    weights = {label: chance(tokens) for label, tokens in labels.items()}
    weights["c"] *= 1 - float(by_prefix[(4,)][5])  # no longer label
    total = sum(weights.values())
    found = tree.probabilities(logits, nodes)
    assert list(found) == list(labels)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    for label, weight in weights.items():
        assert found[label] == pytest.approx(weight / total, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "(open"}, "regex"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused(form: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        compiler().compile(SamplingParams(**form))


def test_labels_that_tokens_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(RequestError, match="tells apart"):
        LabelTree({"a": [1], "b": [1]}, [0])
    with pytest.raises(RequestError, match="no tokens"):
        LabelTree({"a": []}, [0])
    with pytest.raises(RequestError, match="no end-of-sequence"):
        LabelTree({"a": [1], "b": [1, 2]}, [])


def test_a_label_with_a_token_that_the_target_has_no_logits_for_is_refused() -> None:
    compiler = GrammarCompiler(TOKENIZER, END, [])
    with pytest.raises(RequestError, match=f"choice='a<end>': has a token that the target, which has {END}"):
        compiler.compile(SamplingParams(choice=("yes", "a<end>")))
    assert compiler.compile(SamplingParams(choice=("yes", "no"))) is not None
