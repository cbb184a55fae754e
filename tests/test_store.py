"""The object store's promises: one body on MemoryStore and on SeaweedFS."""

import itertools
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rollstream.infra.s3 import S3Store
from rollstream.infra.store import Lost, MemoryStore, NotFound, ObjectStore, StoreError, probe


@pytest.fixture(params=["memory_store", "s3_store"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


# ---------------------------------------------------------------------- whole objects


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000], ids=len)
def test_what_was_put_is_read(store: ObjectStore, data: bytes) -> None:
    etag = store.put("a/b", data)
    assert store.get("a/b") == (data, etag)
    entry = store.head("a/b")
    assert (entry.key, entry.size, entry.etag) == ("a/b", len(data), etag)
    assert abs(entry.modified - datetime.now(UTC)) < timedelta(minutes=5)


def test_put_replaces(store: ObjectStore) -> None:
    old = store.put("a", b"old")
    new = store.put("a", b"new")
    assert old != new
    assert store.get("a") == (b"new", new)


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, None, b"0123456789"), (3, None, b"3456789"), (3, 4, b"3456"), (8, 10, b"89"), (0, 0, b""), (10, 1, b"")],
)
def test_range_is_read(store: ObjectStore, start: int, length: int | None, expected: bytes) -> None:
    etag = store.put("a", b"0123456789")
    assert store.get("a", start=start, length=length) == (expected, etag)


def test_missing_object_is_not_found(store: ObjectStore, tmp_path: Path) -> None:
    for start, length in ((0, None), (1, None), (0, 0)):
        with pytest.raises(NotFound, match="missing"):
            store.get("missing", start=start, length=length)
    with pytest.raises(NotFound, match="missing"):
        store.head("missing")
    with pytest.raises(NotFound):
        store.get_file("missing", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_listing_takes_a_prefix_of_the_key_and_sorts(store: ObjectStore) -> None:
    for key in ("b", "a/2", "a/1", "a/10/x", "ab"):
        store.put(key, key.encode())
    assert [entry.key for entry in store.list()] == ["a/1", "a/10/x", "a/2", "ab", "b"]
    assert [entry.key for entry in store.list("a/")] == ["a/1", "a/10/x", "a/2"]
    assert [(entry.key, entry.size) for entry in store.list("a/1")] == [("a/1", 3), ("a/10/x", 6)]
    assert [entry.etag for entry in store.list("b")] == [store.head("b").etag]
    assert list(store.list("c")) == []


def test_listing_goes_over_pages(store: ObjectStore) -> None:
    keys = [f"many/{number:04d}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.put, keys, itertools.repeat(b"")))
    assert [entry.key for entry in store.list("many/")] == keys


def test_delete_is_fine_where_nothing_is(store: ObjectStore) -> None:
    store.put("a", b"x")
    store.delete("a")
    store.delete("a")
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("a")


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("size", [0, 100, 13 << 20])
def test_file_goes_there_and_back(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("rollstream.infra.s3.PART", 5 << 20)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(i % 251 for i in range(1009)) * (size // 1009) + b"!" * (size % 1009))
    etag = store.put_file("file", source)
    target.write_bytes(b"what was there before")
    entry = store.get_file("file", target)
    assert (entry.size, entry.etag) == (size, etag)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert list(store.uploads()) == []


def test_abandoned_upload_is_listed_and_aborted(store: MemoryStore | S3Store) -> None:
    kept, dropped = store.begin("a/kept"), store.begin("a/dropped")
    assert {(upload.key, upload.upload_id) for upload in store.uploads("a/")} == {kept[:2], dropped[:2]}
    assert list(store.uploads("b/")) == []
    store.abort(dropped)
    store.abort(dropped)
    assert [upload.key for upload in store.uploads()] == ["a/kept"]
    assert list(store.list()) == []
    store.abort(kept)


# ---------------------------------------------------------------------- case 8: races


def race(store: ObjectStore, key: str, *, if_none_match: bool = False, if_match: str | None = None) -> list[str]:
    """Eight threads write at once; the values of those that won."""
    start = threading.Barrier(8)

    def write(racer: int) -> str | None:
        # An ETag may be a digest of the bytes, so equal values would match each other.
        value = f"racer {racer} {uuid.uuid4()}"
        start.wait()
        try:
            store.put(key, value.encode(), if_none_match=if_none_match, if_match=if_match)
        except Lost:
            return None
        return value

    with ThreadPoolExecutor(8) as pool:
        return [value for value in pool.map(write, range(8)) if value is not None]


def test_one_of_eight_creates(store: ObjectStore) -> None:
    for turn in range(3):
        winners = race(store, f"created-{turn}", if_none_match=True)
        assert len(winners) == 1
        assert store.get(f"created-{turn}").data == winners[0].encode()


def test_one_of_eight_replaces(store: ObjectStore) -> None:
    etag = store.put("latest", b"zero")
    for _ in range(3):
        winners = race(store, "latest", if_match=etag)
        assert len(winners) == 1
        data, etag = store.get("latest")
        assert data == winners[0].encode()


def test_lost_writes_change_nothing(store: ObjectStore) -> None:
    first = store.put("latest", b"first")
    second = store.put("latest", b"second", if_match=first)
    with pytest.raises(Lost):
        store.put("latest", b"stale", if_match=first)
    with pytest.raises(Lost):
        store.put("latest", b"again", if_none_match=True)
    assert store.get("latest") == (b"second", second)


def test_compare_and_set_of_a_missing_key_is_lost(store: ObjectStore) -> None:
    etag = store.put("gone", b"x")
    store.delete("gone")
    with pytest.raises(Lost):
        store.put("gone", b"y", if_match=etag)
    assert list(store.list()) == []


# ---------------------------------------------------------------------- probe


def test_probe_accepts_an_honest_store_and_leaves_nothing(store: ObjectStore) -> None:
    probe(store, "run/")
    assert list(store.list()) == []


class Careless(MemoryStore):
    """Ignores some of the conditions, as some S3-compatible stores do."""

    def __init__(self, *ignored: str) -> None:
        super().__init__()
        self._ignored = ignored

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        return super().put(
            key,
            data,
            if_none_match=if_none_match and "none" not in self._ignored,
            if_match=None if "match" in self._ignored else if_match,
        )


class Racy(MemoryStore):
    """Looks, and writes later: right one at a time, wrong in a race."""

    def __init__(self) -> None:
        super().__init__()
        self._racers = threading.Barrier(8)

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        if if_none_match:
            if self.list(key):
                raise Lost(key)
            self._racers.wait(5)
        return super().put(key, data, if_match=if_match)


class Lenient(MemoryStore):
    """Takes If-Match to a missing key for a creation."""

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        here = bool(self.list(key))
        return super().put(key, data, if_none_match=if_none_match, if_match=if_match if here else None)


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (Careless("none"), "If-None-Match"),
        (Careless("match"), "If-Match"),
        (Careless("none", "match"), "If-None-Match"),
        (Racy(), "of 8 concurrent writes with If-None-Match"),
        (Lenient(), "If-Match to a key that does not exist"),
    ],
    ids=["ignores-none-match", "ignores-match", "ignores-both", "looks-then-writes", "creates-on-match"],
)
def test_probe_refuses_a_careless_store(store: MemoryStore, told: str) -> None:
    with pytest.raises(StoreError, match="ignores conditional writes") as caught:
        probe(store)
    assert told in str(caught.value)
    assert not caught.value.retriable
    assert list(store.list()) == []
