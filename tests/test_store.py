"""The object store's promises: one body on MemoryStore and on SeaweedFS."""

import pytest
from rollstream.infra.store import ObjectStore, probe


@pytest.fixture(params=["memory_store", "s3_store"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    return request.getfixturevalue(request.param)


def test_probe_accepts(store: ObjectStore) -> None:
    probe(store, "a/")
    assert store.list() == []
