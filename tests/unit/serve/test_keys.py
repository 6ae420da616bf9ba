"""Keys: only the right one opens, limits hold and recover, and the file may change under way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from cast_ray.config import ServeLimits
from cast_ray.errors import ConfigError
from cast_ray.serve.answers import question_of
from cast_ray.serve.keys import REREAD_S, Caller, Keyring, hash_key, new_key
from cast_ray.serve.protocol import CompletionRequest
from cast_ray.serve.refusal import Refusal


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def keyring(folder: Path, clock: Clock, **limits: int) -> tuple[Keyring, str]:
    key, digest = new_key()
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [{"name": "a", "sha256": digest, **limits}]}))
    ring = Keyring(path, clock)
    ring.load()
    return ring, key


def test_only_the_right_key_opens(tmp_path: Path) -> None:
    ring, key = keyring(tmp_path, Clock())
    assert ring.check(f"Bearer {key}").owner == "a"
    assert ring.check(f"bearer  {key}").owner == "a"
    for header in (
        None,
        "",
        key,
        f"Basic {key}",
        f"Bearer {key}x",
        f"Bearer {hash_key(key)}",
        "Bearer " + "x" * 10_000,
    ):
        with pytest.raises(Refusal) as found:
            ring.check(header)
        assert found.value.status == 401
        assert key not in found.value.message
    assert key not in (tmp_path / "keys.yaml").read_text()


def test_requests_a_minute_are_limited_and_come_back(tmp_path: Path) -> None:
    clock = Clock()
    ring, key = keyring(tmp_path, clock, requests_per_minute=3)
    caller = ring.check(f"Bearer {key}")
    for _ in range(3):
        with caller.admitted():
            pass
    with pytest.raises(Refusal) as found, caller.admitted():
        pass
    assert (found.value.status, found.value.retry_after) == (429, 20)
    assert caller.headers()["x-ratelimit-remaining-requests"] == "0"
    clock.now += 20
    with caller.admitted():
        pass


def test_tokens_are_charged_when_they_are_known_and_may_overdraw(tmp_path: Path) -> None:
    clock = Clock()
    ring, key = keyring(tmp_path, clock, tokens_per_minute=60)
    caller = ring.check(f"Bearer {key}")
    with caller.admitted():
        caller.used(90)
    with pytest.raises(Refusal) as found, caller.admitted():
        pass
    assert found.value.retry_after == 31
    clock.now += 31
    with caller.admitted():
        pass


def test_requests_at_once_are_limited(tmp_path: Path) -> None:
    ring, key = keyring(tmp_path, Clock(), concurrency=1)
    caller = ring.check(f"Bearer {key}")
    with caller.admitted(), pytest.raises(Refusal), caller.admitted():
        pass
    with pytest.raises(RuntimeError), caller.admitted():
        raise RuntimeError
    assert caller.running == 0


def test_a_key_can_be_withdrawn_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    ring, key = keyring(tmp_path, clock)
    assert ring.check(f"Bearer {key}").owner == "a"
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [")
    clock.now += REREAD_S
    assert ring.check(f"Bearer {key}").owner == "a"
    _, other = new_key()
    path.write_text(yaml.safe_dump({"keys": [{"name": "b", "sha256": other}]}))
    os.utime(path, ns=(1, 1))
    clock.now += REREAD_S
    with pytest.raises(Refusal):
        ring.check(f"Bearer {key}")


def test_a_reread_file_does_not_give_back_what_was_used(tmp_path: Path) -> None:
    clock = Clock()
    ring, key = keyring(tmp_path, clock, requests_per_minute=1)
    with ring.check(f"Bearer {key}").admitted():
        pass
    ring.load()
    with pytest.raises(Refusal), ring.check(f"Bearer {key}").admitted():
        pass


@pytest.mark.parametrize("text", ["keys: [", "keys: [{name: a}]", "keys: [{name: a, sha256: plain-key}]", "7"])
def test_a_file_that_is_none_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ConfigError):
        Keyring(tmp_path / "keys.yaml").load()
    with pytest.raises(ConfigError):
        Keyring(tmp_path / "absent.yaml").load()


def test_answers_are_looked_up_among_the_requests_of_a_key_that_shares_and_never_among_others(tmp_path: Path) -> None:
    shares, keeps, unsaid = (new_key() for _ in range(3))
    entries = [
        {"name": "shares", "sha256": shares[1], "share_lookups": True},
        {"name": "keeps", "sha256": keeps[1], "share_lookups": False},
        {"name": "unsaid", "sha256": unsaid[1]},
    ]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": entries}))
    ring = Keyring(path)
    ring.load()

    def scope(key: str, default: bool) -> str | None:
        return ring.check(f"Bearer {key}").lookup_scope(default)

    assert [scope(key, False) for key, _ in (shares, keeps, unsaid)] == ["key shares", None, None]
    assert [scope(key, True) for key, _ in (shares, keeps, unsaid)] == ["key shares", None, "key unsaid"]
    assert Caller().lookup_scope(False) is None


def test_a_question_carries_the_scope_to_the_engines_and_has_none_unless_told() -> None:
    body = CompletionRequest(model="m", prompt="hello", max_tokens=4)
    told = question_of(body, ServeLimits(), "m", lookup_scope="key alice")
    assert [ask.lookup_scope for ask in told.asks] == ["key alice"]
    assert [ask.lookup_scope for ask in question_of(body, ServeLimits(), "m").asks] == [None]
