"""Autoscaling and routing on a live server: replicas come with the load, and requests with one prefix stay together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving import Server, running_server, wait_for

pytestmark = pytest.mark.timeout(300)
PREFIX = " ".join(f"t{number}" for number in range(150))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("scaling"), replicas=1, max_replicas=2, target_tokens=60) as found:
        yield found


def ask(server: Server, prompt: str, tokens: int) -> int:
    out = server.client().completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert out.usage is not None
    return out.usage.completion_tokens


def test_a_second_replica_comes_with_the_load_and_prefixes_stay_together(server: Server) -> None:
    assert len(server.replicas()) == 1
    done: list[int] = []
    with ThreadPoolExecutor(6) as clients:

        def more() -> bool:
            """Keep six requests going until there is a second replica."""
            done.extend(clients.map(lambda number: ask(server, f"t{number} t2", 200), range(6)))
            return len(server.replicas()) == 2

        wait_for(more)
    assert set(done) == {200}

    # Both are idle now: without affinity they would take turns.
    before = finished(server)
    for number in range(8):
        ask(server, f"{PREFIX} t{200 + number}", 2)
    wait_for(lambda: sum(finished(server).values()) == sum(before.values()) + 8)  # the status is a moment old
    assert sorted(count - before[name] for name, count in finished(server).items()) == [0, 8]


def finished(server: Server) -> dict[str, int]:
    """Requests that each replica has answered."""
    return {replica["name"]: sum(replica["finished"].values()) for replica in server.replicas()}
