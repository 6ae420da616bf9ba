"""The texts that lookup looks in: found by their suffixes, kept apart by request and scope, bounded in memory."""

from __future__ import annotations

import random

import numpy as np

from cast_ray.drafters.store import TextStore
from cast_ray.drafters.suffix import LEVELS, LONGEST, NOTHING


def find(store: TextStore, lengths: list[int], scopes: list[int] | None = None) -> set[tuple[int, int, int, bool]]:
    """(request, position of the last matching token, length, whether in the ring), of requests in rows 0, 1, …"""
    rows = np.arange(len(lengths))
    matches, kept = store.find(rows, np.array(lengths), np.array(scopes or [0] * len(lengths)))
    return set(zip(matches.query.tolist(), matches.at.tolist(), matches.lengths.tolist(), kept.tolist(), strict=True))


def naive(text: list[int]) -> set[tuple[int, int]]:
    """Every earlier place at which the end of the text stands too, with the length of the match."""
    found = set()
    for at in range(len(text) - 1):
        length = 0
        while length < LONGEST and length <= at and text[at - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= LEVELS[0]:
            found.add((at, length))
    return found


def test_matches_are_those_of_a_search_through_the_whole_text() -> None:
    rng = random.Random(5)
    for vocabulary in (2, 4, 30):
        store = TextStore(2, 40, 0)
        text: list[int] = []
        for _ in range(40):
            text.append(rng.randrange(vocabulary))
            store.write([(1, len(text) - 1, text[-1:])])
            start = int(store.start_of(np.array([1]))[0])
            rows, lengths, scopes = np.array([1]), np.array([len(text)]), np.array([0])
            matches, _ = store.find(rows, lengths, scopes)
            found = set(zip((matches.at - start).tolist(), matches.lengths.tolist(), strict=True))
            assert found <= naive(text)
            # Chains are cut behind their newest links: of short texts nothing is lost, of the longest matches neither.
            if vocabulary == 30:
                assert found == naive(text)
            elif naive(text):
                longest = max(length for _, length in naive(text))
                assert max((length for _, length in found), default=0) >= min(longest, LEVELS[-1])


def test_a_text_written_at_once_is_found_like_one_written_token_by_token() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(5) for _ in range(60)] for _ in range(3)]
    at_once, by_token = TextStore(3, 80, 0), TextStore(3, 80, 0)
    at_once.write([(row, 0, text) for row, text in enumerate(texts)])
    for place in range(60):
        by_token.write([(row, place, [text[place]]) for row, text in enumerate(texts)])
    assert find(at_once, [60] * 3) == find(by_token, [60] * 3) != set()


def test_a_row_that_changes_hands_holds_nothing_of_who_had_it() -> None:
    store = TextStore(1, 64, 0)
    store.write([(0, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3)])
    assert find(store, [27])
    store.clear(0)
    store.write([(0, 0, [11, 12, 1, 2, 3])])
    assert find(store, [5]) == set()


def test_outputs_are_found_within_their_scope_and_never_outside() -> None:
    store = TextStore(2, 32, 4096)
    mine, others = store.scope("mine"), store.scope("others")
    assert mine != others == store.scope("others")
    rng = random.Random(2)
    secret = [rng.randrange(1000, 2000) for _ in range(100)]
    store.keep(others, secret[:10], secret[10:])
    store.keep(mine, [1, 2], [3, 4, 5, 6])
    store.write([(0, 0, secret[50:60]), (1, 0, [9, 3, 4])])
    assert find(store, [10, 3], [mine, mine]) == {(1, int(store.start_of(np.array([2]))[0]) + 101 + 3, 2, True)}
    assert find(store, [10, 3], [0, 0]) == set()
    assert {(query, length) for query, _, length, _ in find(store, [10, 3], [others, others])} == {(0, 10)}


def test_fifty_thousand_rows_take_the_memory_of_the_ring_and_the_oldest_go_first() -> None:
    store = TextStore(1, 64, 20_000)
    size, arrays = store.bytes, len(store.index.tokens)
    scope = store.scope("job")
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 30_000, (50_000, 40))
    for row in rows:
        store.keep(scope, row[:4].tolist(), row[4:].tolist())
    assert store.outputs == 50_000
    assert store.bytes == size
    assert len(store.index.tokens) == arrays
    assert size < 40 * (20_000 + 64 + 2 * LONGEST) + 2**19
    # What the ring holds of the last rows is found; of the first ones nothing is left.
    for row, there in ((rows[-1], True), (rows[-300], True), (rows[0], False), (rows[-600], False)):
        store.clear(0)
        store.write([(0, 0, row[10:20].tolist())])
        assert bool(find(store, [10], [scope])) == there


def test_an_output_longer_than_its_share_is_cut_and_one_without_tokens_is_none() -> None:
    store = TextStore(1, 64, 800)
    scope = store.scope("job")
    store.keep(scope, [1, 2, 3], [])
    assert store.outputs == 0
    store.keep(scope, [], list(range(5000)))
    assert (store.index.tokens != NOTHING).sum() == 100


def test_a_store_without_room_for_outputs_finds_requests_that_share_their_own_text() -> None:
    for kept_tokens in (0, 1, 15):
        store = TextStore(2, 128, kept_tokens)
        texts = [[1, 2] * 20, [3] * 40]
        store.write([(row, 0, text) for row, text in enumerate(texts)])
        alone = find(store, [40, 40])
        # So many scopes that the chains of some are by chance those of a request.
        for number in range(1000):
            scope = store.scope(str(number))
            store.keep(scope, texts[0], texts[1])
            assert {match for match in find(store, [40, 40], [scope] * 2) if not match[3]} == alone


def test_scopes_are_forgotten_the_longest_unused_first(monkeypatch: object) -> None:
    store = TextStore(1, 32, 1000)
    import cast_ray.drafters.store as module

    monkeypatch.setattr(module, "MOST_SCOPES", 3)  # type: ignore[attr-defined]
    first = store.scope("a")
    for name in ("b", "c"):
        store.scope(name)
    assert store.scope("a") == first
    store.scope("d")
    assert store.scope("a") == first
    assert store.scope("b") > 4
