"""What integration tests share: the application that the API's tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Server, running_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"body_bytes": 65536, "n": 4, "storage_bytes": 20_000}
    with running_server(tmp_path_factory.mktemp("serve"), max_ongoing=32, max_queued=4, limits=limits) as found:
        yield found
