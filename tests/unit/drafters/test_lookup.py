"""Lookup drafting: its trees, what they promise, how sources fade and come back, and what it costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from cast_ray.drafters.lookup import MAX_DEPTH, OUTPUT, PROMPT, ROWS, Lookup, split_name
from cast_ray.trees.merge import Offer


@dataclass
class Text:
    """A request that runs: what Lookup sees of one."""

    arrival: int
    row: int
    tokens: list[int]
    num_prompt: int = 0
    lookup_scope: str | None = None
    ahead: list[int] = field(default_factory=list)  # what the target is going to write

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)


def checked(offer: Offer, most: int) -> Offer:
    """An offer that keeps its promises: parents first, families no heavier than their parents, siblings distinct."""
    batch, width = offer.tokens.shape
    assert width <= most
    for b in range(batch):
        count = int(offer.counts[b])
        assert (np.diff(offer.masses[b, :count]) <= 0).all()
        children: dict[int, list[int]] = {}
        for node in range(count):
            parent = int(offer.parents[b, node])
            assert parent < node
            assert offer.depths[b, node] == (1 if parent < 0 else offer.depths[b, parent] + 1)
            children.setdefault(parent, []).append(node)
        for parent, nodes in children.items():
            mass = 1.0 if parent < 0 else offer.masses[b, parent]
            assert offer.masses[b, nodes].sum() <= mass * (1 + 1e-6)
            assert len(set(offer.tokens[b, nodes].tolist())) == len(nodes)
        assert (offer.masses[b, count:] == 0).all()
        assert (offer.parents[b, count:] == -1).all()
    return offer


def chain(offer: Offer, row: int = 0) -> list[int]:
    """The tokens of the heaviest path."""
    found, node = [], -1
    while True:
        children = [n for n in range(int(offer.counts[row])) if offer.parents[row, n] == node]
        if not children:
            return found
        node = children[0]
        found.append(int(offer.tokens[row, node]))


def write(lookup: Lookup, texts: list[Text], rounds: int, step: int = 1, most: int = 31) -> list[Offer | None]:
    """Rounds in which every text gains `step` tokens of what is ahead of it."""
    offers = []
    for _ in range(rounds):
        offer = lookup.propose(texts, most)
        offers.append(None if offer is None else checked(offer, most))
        committed = [[text.ahead.pop(0) for _ in range(min(step, len(text.ahead)))] for text in texts]
        for text, tokens in zip(texts, committed, strict=True):
            text.tokens.extend(tokens)
        lookup.observe(texts, committed, [not text.ahead for text in texts])
    return offers


def passage(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5000) for _ in range(length)]


def test_a_copied_passage_is_offered_as_deep_as_it_goes() -> None:
    source = passage(200)
    lookup = Lookup(1, 1024, 0)
    text = Text(0, 0, [*source, 9001, 9002], ahead=list(source))
    offers = write(lookup, [text], 40, most=63)
    last = offers[-1]
    assert last is not None
    assert (last.sources[0, : int(last.counts[0])] == PROMPT).all()
    deep = chain(last)
    assert len(deep) >= 60
    assert deep == source[39 : 39 + len(deep)]
    assert last.masses[0, 40] > 0.3
    # Nothing stands before the first copied token; a match of two tokens promises little.
    assert offers[0] is None
    assert offers[2] is not None
    assert offers[2].masses[0, 0] < 0.5


def test_a_text_that_repeats_itself_goes_on_so_beyond_its_end() -> None:
    lookup = Lookup(1, 1024, 0)
    text = Text(0, 0, passage(8), ahead=[1, 2, 3] * 40)
    last = write(lookup, [text], 40)[-1]
    assert last is not None
    assert chain(last)[:9] == ([1, 2, 3] * 20)[39:48]
    assert last.sources[0, 0] == OUTPUT


def test_continuations_branch_and_share_their_beginning() -> None:
    lookup = Lookup(1, 1024, 0)
    head = [7, 8, 9]
    told = [*head, 1, 2, 3, 20, *head, 1, 2, 4, 21, *head, 5, 6, 22, *head, 1, 2, 3, 23, *head]
    offer = lookup.propose([Text(0, 0, told)], 31)
    assert offer is not None
    checked(offer, 31)
    first = [int(t) for t, d in zip(offer.tokens[0], offer.depths[0], strict=True) if d == 1]
    assert set(first) == {1, 5}
    assert first[0] == 1
    nodes = {int(token): node for node, token in enumerate(offer.tokens[0]) if offer.depths[0, node] == 3}
    assert offer.masses[0, nodes[3]] > offer.masses[0, nodes[4]] > 0
    assert offer.parents[0, nodes[3]] == offer.parents[0, nodes[4]]


def baited(source: list[int], turns: int, seed: int) -> list[int]:
    """Three tokens of some place in `source`, again and again, but never what came next there."""
    rng = random.Random(seed)
    starts = [rng.randrange(len(source) - 4) for _ in range(turns)]
    return [token for i, start in enumerate(starts) for token in (*source[start : start + 3], 6000 + i)]


def promised_behind_bait(offers: list[Offer | None], row: int = 0) -> list[float]:
    """What was promised at the end of every bait."""
    return [float(offer.masses[row, 0]) if offer is not None else 0.0 for offer in offers[3::4]]


def test_a_source_that_is_wrong_fades_within_a_few_rounds_and_comes_back() -> None:
    lookup = Lookup(1, 4096, 0)
    source = passage(2000, seed=4)
    text = Text(0, 0, list(source), ahead=baited(source, 40, seed=1))
    promised = promised_behind_bait(write(lookup, [text], 160))
    assert promised[0] > 0.3
    # Half of it is gone after five that were wrong. That two places agree is news once.
    assert max(promised[6:12]) < 0.6 * promised[0]
    assert np.median(promised[20:]) < 0.1
    assert np.median(promised[30:]) < np.median(promised[20:30])
    text.ahead = source[:80]
    back = write(lookup, [text], 70)[-1]
    assert back is not None
    assert back.masses[0, 0] > 0.8


def test_what_a_request_trusts_hangs_little_on_another() -> None:
    lookup = Lookup(2, 4096, 0)
    source = passage(1000, seed=6)
    good = Text(0, 0, list(source), ahead=source[:160])
    bad = Text(1, 1, list(source), ahead=baited(source, 40, seed=2))
    offers = write(lookup, [good, bad], 160)
    behind = promised_behind_bait(offers, row=1)
    assert np.median(behind[10:]) < 0.2
    sure = [float(offer.masses[0, 0]) if offer is not None else 0.0 for offer in offers[40:]]
    assert min(sure) > 0.5
    assert np.median(sure) > 0.9


def test_finished_rows_are_found_by_rows_of_their_scope_only() -> None:
    answer = passage(60, seed=9)
    lookup = Lookup(3, 512, 4096)
    first = Text(0, 0, [*passage(20, seed=1), 42, 43, 44], lookup_scope="job", ahead=list(answer))
    write(lookup, [first], 60)
    assert not first.ahead
    later = [
        Text(1, 0, [*passage(20, seed=2), 42, 43, 44], lookup_scope="job"),
        Text(2, 1, [*passage(20, seed=2), 42, 43, 44], lookup_scope="other"),
        Text(3, 2, [*passage(20, seed=2), 42, 43, 44]),
    ]
    offer = lookup.propose(later, 31)
    assert offer is not None
    assert offer.counts[0] > 0
    assert offer.counts[1] == offer.counts[2] == 0
    # The beginning of an answer is found by the end of its prompt.
    assert offer.sources[0, 0] == ROWS
    assert chain(offer)[:3] == answer[:3]


def test_a_request_that_moves_to_another_row_is_read_again_and_one_that_takes_its_row_starts_anew() -> None:
    source = passage(50)
    lookup = Lookup(2, 512, 0)
    text = Text(0, 0, [*source, 9001], ahead=list(source))
    write(lookup, [text], 20)
    text.row = 1
    moved = lookup.propose([text], 31)
    assert moved is not None
    assert chain(moved)[:5] == source[20:25]
    stranger = Text(1, 1, source[:20])
    assert lookup.propose([stranger], 31) is None


@pytest.mark.parametrize("kind", ["one token", "random", "mimic"])
def test_adversarial_rows_are_bounded_in_nodes(kind: str) -> None:
    rng = random.Random(3)
    lookup = Lookup(4, 2048, 1 << 14)
    texts = []
    model = passage(1500, seed=11)
    for row in range(4):
        if kind == "one token":
            ahead = [5] * 200
        elif kind == "random":
            ahead = [rng.randrange(30_000) for _ in range(200)]
        else:
            ahead = baited(model, 50, seed=row)
        texts.append(Text(row, row, list(model), lookup_scope="job", ahead=ahead))
    offers = write(lookup, texts, 200, most=63)
    # The sum of the masses is what a row is told to gain.
    told = [float(offer.masses.sum()) / 4 if offer is not None else 0.0 for offer in offers[100:]]
    assert all(offer.max_depth <= MAX_DEPTH for offer in offers if offer is not None)
    if kind == "one token":
        assert told[-1] > 20
    elif kind == "random":
        assert np.mean(told) < 0.01
    else:
        # Of four tokens the last one of each bait is foreseen; the one behind it never.
        assert np.mean(told) < 0.5
        assert np.mean(told[3::4]) < 0.15


def test_a_text_that_grows_too_long_is_offered_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cast_ray.drafters.lookup.LONGEST_TEXT", 24)
    lookup = Lookup(2, 1000, 100)
    text, other = Text(0, 1, [1, 2, 3] * 8, lookup_scope="a"), Text(1, 0, [4, 5] * 4, lookup_scope="a")
    offer = lookup.propose([text, other], 20)
    assert offer is not None
    assert offer.counts.all()
    text.tokens.append(1)
    for _ in range(2):
        offer = lookup.propose([text, other], 20)
        assert offer is not None
        assert (offer.counts > 0).tolist() == [False, True]
        text.tokens.append(7)
    assert lookup.propose([text], 20) is None
    # Too long from the start; and who comes next has the row for itself.
    assert lookup.propose([Text(2, 1, [6] * 30, lookup_scope="a")], 20) is None
    assert lookup.propose([Text(3, 1, [6] * 20)], 20) is not None


def test_the_setting_names_a_drafter_lookup_or_both() -> None:
    assert split_name("lookup") == (None, True)
    assert split_name("embedded+lookup") == ("embedded", True)
    assert split_name("auto+lookup") == ("auto", True)
    assert split_name("some/folder") == ("some/folder", False)
    assert split_name(None) == (None, False)
