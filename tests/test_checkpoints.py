"""Checkpoints, broken on purpose: one body on MemoryStore and on SeaweedFS."""

import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.infra import transfer
from rollstream.infra.checkpoints import CheckpointError, Checkpoints, DigestMismatch, Fenced, Manifest, manifest_digest
from rollstream.infra.cursors import Cursor, Cursors
from rollstream.infra.log import Partition
from rollstream.infra.manifest import decode_manifest, encode_manifest
from rollstream.infra.store import Content, Entry, MemoryStore, NotFound, ObjectStore, StoreError, Upload

CURSORS = Cursors({Partition("rollstream.trajectories.x", 1): Cursor(low=7, above=((9, 12),))})
RUN = "run-1"
WEIGHTS = "weights/model.safetensors"
Files = dict[str, Path | bytes]


@pytest.fixture(params=["memory_store", "s3_store"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests for each file."""
    monkeypatch.setattr(transfer, "RANGE", 1000)


def files_of(version: int) -> Files:
    """A checkpoint whose weights change with the version, and its config does not."""
    return {
        "weights/config.json": b'{"model_type": "llama"}',
        WEIGHTS: bytes((version * i * i) % 251 for i in range(3500)),
        "trainer/empty": b"",
    }


def publish(checkpoints: Checkpoints, version: int, *, incarnation: str = "a", files: Files | None = None) -> Manifest:
    return checkpoints.publish(
        version,
        files or files_of(version),
        parent=version - 1 or None,
        incarnation=incarnation,
        step=version * 10,
        cursors=CURSORS,
        model_config={"layers": 3},
        tokenizer="t",
        metadata={"objective": "grpo"},
    )


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def object_keys(store: ObjectStore, run: str = RUN) -> set[str]:
    return {entry.key for entry in store.list(f"{run}/objects/")}


class Watched:
    """A store that lets a test look at, and fail, every call that is made through it."""

    def __init__(self, store: ObjectStore, before: Callable[[str, str], None]) -> None:
        self._store, self._before = store, before

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        self._before("put", key)
        return self._store.put(key, data, if_none_match=if_none_match, if_match=if_match)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        self._before("get", key)
        return self._store.get(key, start=start, length=length)

    def head(self, key: str) -> Entry:
        self._before("head", key)
        return self._store.head(key)

    def delete(self, key: str) -> None:
        self._before("delete", key)
        self._store.delete(key)

    def put_file(self, key: str, path: Path) -> str:
        self._before("put", key)
        return self._store.put_file(key, path)

    def get_file(self, key: str, path: Path) -> Entry:
        self._before("get", key)
        return self._store.get_file(key, path)

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        return self._store.uploads(prefix)

    def abort(self, upload: Upload) -> None:
        self._store.abort(upload)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        self._before("list", prefix)
        return self._store.list(prefix)


class Calls:
    """Counts calls; from the n-th on each fails, as for a process that is dead."""

    def __init__(self, *, alive: int | None = None) -> None:
        self.made: list[tuple[str, str]] = []
        self._alive, self._lock = alive, threading.Lock()

    def __call__(self, name: str, key: str) -> None:
        with self._lock:
            if self._alive is not None and len(self.made) >= self._alive:
                raise StoreError("dead")
            self.made.append((name, key))

    def of(self, name: str, part: str) -> int:
        return sum(made == name and part in key for made, key in self.made)


@pytest.mark.usefixtures("small_ranges")
def test_what_is_published_is_fetched(store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, RUN)
    assert (checkpoints.latest(), checkpoints.versions(), checkpoints.next_version()) == (None, [], 1)
    path = tmp_path / "source"
    path.write_bytes(b"from disk" * 999)
    manifest = publish(checkpoints, 1, files=files_of(1) | {"weights/nested/file": path})
    read = Checkpoints(store, RUN).latest()
    assert read is not None
    assert read == manifest
    assert (read.parent, read.incarnation, read.step, read.cursors) == (None, "a", 10, CURSORS)
    assert (read.model_config, read.tokenizer, read.metadata) == ({"layers": 3}, "t", {"objective": "grpo"})
    checkpoints.fetch(manifest, "", tmp_path / "all")
    assert content(tmp_path / "all") == files_of(1) | {"weights/nested/file": path.read_bytes()}
    checkpoints.fetch(manifest, "weights/", tmp_path / "some")
    assert set(content(tmp_path / "some")) == {"weights/config.json", WEIGHTS, "weights/nested/file"}


def test_versions_and_lineage(store: ObjectStore) -> None:
    checkpoints = Checkpoints(store, RUN)
    for version, parent in ((1, None), (2, 1), (9, 1), (10, 9)):
        checkpoints.publish(version, files_of(version), parent=parent, incarnation="a", step=version)
    assert checkpoints.versions() == [1, 2, 9, 10]
    assert checkpoints.next_version() == 11
    assert [m.version for m in checkpoints.lineage(10)] == [10, 9, 1]
    assert [m.version for m in checkpoints.lineage(2)] == [2, 1]
    with pytest.raises(CheckpointError, match="no checkpoint of policy 3"):
        list(checkpoints.lineage(3))
    with pytest.raises(CheckpointError, match="expected a policy version above 10, found 4"):
        publish(checkpoints, 4)
    assert Checkpoints(store, "other").versions() == []


def test_what_did_not_change_is_not_uploaded_again(store: ObjectStore) -> None:
    calls = Calls()
    checkpoints = Checkpoints(Watched(store, calls), RUN)
    publish(checkpoints, 1)
    assert calls.of("put", "/objects/") == 3
    publish(checkpoints, 2)
    assert calls.of("put", "/objects/") == 4
    publish(Checkpoints(Watched(store, calls), RUN), 3, files=files_of(2))
    assert calls.of("put", "/objects/") == 4


def test_an_old_object_that_nobody_is_known_to_need_is_written_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector may be about to delete it."""
    calls = Calls()
    publish(Checkpoints(store, RUN), 1)
    monkeypatch.setattr(transfer, "FRESH", transfer.FRESH * 0)
    publish(Checkpoints(Watched(store, calls), RUN), 2, files=files_of(1))
    assert calls.of("put", "/objects/") == 3


def test_a_damaged_object_is_mended_by_the_next_publish_that_needs_it(store: ObjectStore, tmp_path: Path) -> None:
    manifest = publish(Checkpoints(store, RUN), 1)
    shorten(store, f"{RUN}/objects/{manifest.files[WEIGHTS].sha256}")
    again = publish(Checkpoints(store, RUN), 2, files=files_of(1))
    Checkpoints(store, RUN).fetch(again, "", tmp_path / "policy")
    assert content(tmp_path / "policy") == files_of(1)


def test_what_was_collected_since_is_uploaded_again(store: ObjectStore, tmp_path: Path) -> None:
    """A trainer that lost the run and took it back remembers what it published; meanwhile that may be gone."""
    first, second = Checkpoints(store, RUN), Checkpoints(store, RUN)
    publish(first, 1, incarnation="a")
    second.claim("b")
    publish(second, 2, incarnation="b", files={"weights/x": b"other"})
    assert second.collect([], grace=0.0).objects == 3
    first.claim("a")
    manifest = publish(first, 3, incarnation="a", files=files_of(1))
    first.fetch(manifest, "", tmp_path / "policy")
    assert content(tmp_path / "policy") == files_of(1)


def test_of_publishers_racing_one_wins(store: ObjectStore) -> None:
    names = [f"trainer-{i}" for i in range(8)]

    def race(name: str) -> Manifest | Fenced:
        try:
            return publish(Checkpoints(store, RUN), 1, incarnation=name, files={"weights/x": name.encode()})
        except Fenced as fenced:
            return fenced

    with ThreadPoolExecutor(len(names)) as pool:
        results = list(pool.map(race, names))
    (winner,) = [r for r in results if isinstance(r, Manifest)]
    assert Checkpoints(store, RUN).latest() == winner
    for fenced in (r for r in results if isinstance(r, Fenced)):
        assert (fenced.incarnation, fenced.version) == (winner.incarnation, 1)
        assert winner.incarnation in str(fenced)


def test_a_claim_fences_the_older_trainer(store: ObjectStore) -> None:
    old, new = Checkpoints(store, RUN), Checkpoints(store, RUN)
    old.claim("old")
    publish(old, 1, incarnation="old")
    pointer = new.claim("new")
    assert (pointer.version, pointer.incarnation) == (1, "new")
    before = object_keys(store)
    with pytest.raises(Fenced, match=r"trainer new took the run at .* trainer old is fenced, its policy 2") as caught:
        publish(old, 2, incarnation="old")
    assert (caught.value.incarnation, caught.value.version, caught.value.at_ms) == ("new", 1, pointer.claimed_ms)
    assert object_keys(store) == before
    publish(new, 2, incarnation="new")
    latest = new.latest()
    assert latest is not None
    assert (latest.version, latest.incarnation) == (2, "new")


def test_a_claim_in_mid_publish_fences_too_and_the_version_is_spent(store: ObjectStore) -> None:
    new = Checkpoints(store, RUN)
    publish(new, 1, incarnation="old")

    def claim_before_manifest(name: str, key: str) -> None:
        if (name, key) == ("put", new.manifest_key(2)):
            new.claim("new")

    old = Checkpoints(Watched(store, claim_before_manifest), RUN)
    with pytest.raises(Fenced, match="trainer new took the run"):
        publish(old, 2, incarnation="old")
    latest = new.latest()
    assert latest is not None
    assert latest.version == 1
    assert new.next_version() == 3
    with pytest.raises(Fenced, match="policy 2 was created by trainer old") as caught:
        publish(new, 2, incarnation="new")
    assert (caught.value.incarnation, caught.value.version) == ("old", 2)
    publish(new, 3, incarnation="new")
    assert [m.version for m in new.lineage(1)] == [1]


def test_a_claim_at_the_last_moment_fences_too(store: ObjectStore) -> None:
    """Between the look at the pointer and the write to it."""
    new = Checkpoints(store, RUN)
    publish(new, 1, incarnation="old")

    def claim_before_pointer(name: str, key: str) -> None:
        if (name, key) == ("put", f"{RUN}/latest.json"):
            new.claim("new")

    with pytest.raises(Fenced, match="trainer new took the run"):
        publish(Checkpoints(Watched(store, claim_before_pointer), RUN), 2, incarnation="old")
    latest = new.latest()
    assert latest is not None
    assert latest.version == 1


def test_a_claim_sees_the_publish_that_was_faster(store: ObjectStore) -> None:
    old = Checkpoints(store, RUN)
    publish(old, 1, incarnation="old")
    left = [2]

    def publish_before_claim(name: str, key: str) -> None:
        if name == "put" and left:
            publish(old, left.pop(), incarnation="old")

    pointer = Checkpoints(Watched(store, publish_before_claim), RUN).claim("new")
    assert (pointer.version, pointer.incarnation) == (2, "new")
    latest = old.latest()
    assert latest is not None
    assert latest.version == 2


def test_a_publish_may_be_repeated(store: ObjectStore) -> None:
    """The answer was lost, the checkpoint was not: the same publish again finds its own."""
    checkpoints = Checkpoints(store, RUN)
    first = publish(checkpoints, 1)
    assert publish(checkpoints, 1) == first
    assert publish(Checkpoints(store, RUN), 1) == first
    with pytest.raises(Fenced):
        publish(checkpoints, 1, files=files_of(2))


def kills(store: ObjectStore) -> Iterator[tuple[str, int]]:
    """Publishes 1 in run after run, then 2 through a store that dies at call 0, 1, 2, ... until one comes through."""
    for alive in range(100):
        run = f"killed-{alive}"
        publish(Checkpoints(store, run), 1)
        calls = Calls(alive=alive)
        try:
            publish(Checkpoints(Watched(store, calls), run), 2)
        except StoreError:
            yield run, alive
        else:
            return


def test_killed_at_any_call_a_publish_is_whole_or_not_there(store: ObjectStore, tmp_path: Path) -> None:
    killed = 0
    for run, alive in kills(store):
        killed += 1
        latest = Checkpoints(store, run).latest()
        assert latest is not None
        assert latest.version == 1
        Checkpoints(store, run).fetch(latest, "", tmp_path / f"before-{alive}")
        successor = Checkpoints(store, run)
        successor.claim("b")
        version = successor.next_version()
        assert version in {2, 3}
        successor.publish(version, files_of(7), parent=1, incarnation="b", step=2)
        successor.collect([1], grace=0.0)
        needed = {f for v in (1, version) for f in successor.manifest(v).files.values()}
        assert object_keys(store, run) == {f"{run}/objects/{file.sha256}" for file in needed}
        latest = successor.latest()
        assert latest is not None
        successor.fetch(latest, "", tmp_path / f"after-{alive}")
        assert content(tmp_path / f"after-{alive}") == files_of(7)
    assert killed >= 8


def test_failed_at_any_call_a_publish_can_be_repeated_by_the_same_trainer(store: ObjectStore) -> None:
    for run, _ in kills(store):
        again = Checkpoints(store, run)
        assert publish(again, 2) == again.latest()


def shorten(store: ObjectStore, key: str) -> None:
    store.put(key, store.get(key).data[:-1000])


def lengthen(store: ObjectStore, key: str) -> None:
    store.put(key, store.get(key).data + b"x")


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get(key).data)
    data[2345] ^= 1
    store.put(key, bytes(data))


def remove(store: ObjectStore, key: str) -> None:
    store.delete(key)


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shorten, "model.safetensors: expected 3500 bytes, found 2500 bytes"),
        (lengthen, "model.safetensors: expected 3500 bytes, found 3501 bytes"),
        (flip, "model.safetensors: expected SHA-256"),
        (remove, "model.safetensors: its object .* is not in the store"),
    ],
)
def test_a_broken_shard_is_never_served(
    store: ObjectStore, tmp_path: Path, damage: Callable[[ObjectStore, str], None], message: str
) -> None:
    """Case 7: what the worker has stays, whole; `latest` still names the version."""
    checkpoints = Checkpoints(store, RUN)
    first, second = publish(checkpoints, 1), publish(checkpoints, 2)
    target = tmp_path / "policy"
    checkpoints.fetch(first, "weights/", target)
    before = content(target)
    damage(store, f"{RUN}/objects/{second.files[WEIGHTS].sha256}")
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.fetch(second, "weights/", target)
    assert isinstance(caught.value, DigestMismatch) is (damage is not remove)
    assert content(target) == before
    assert {p.name for p in tmp_path.iterdir()} == {"policy", ".objects"}
    assert checkpoints.latest() == second
    checkpoints.fetch(first, "weights/", tmp_path / "fresh")
    assert content(tmp_path / "fresh") == before


def test_a_full_disk_keeps_what_is_there_and_is_told(store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, RUN)
    first, second = publish(checkpoints, 1), publish(checkpoints, 2)
    target = tmp_path / "policy"
    checkpoints.fetch(first, "weights/", target)
    before = content(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large") as caught:
            checkpoints.fetch(second, "weights/", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(target)
    assert content(target) == before
    assert {p.name for p in tmp_path.iterdir()} == {"policy", ".objects"}


@pytest.mark.usefixtures("small_ranges")
def test_a_fetch_that_dies_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    manifest = publish(Checkpoints(store, RUN), 1)
    for alive in range(100):
        calls = Calls(alive=alive)
        try:
            Checkpoints(Watched(store, calls), RUN).fetch(manifest, "", tmp_path / "policy")
        except StoreError:
            assert list(tmp_path.iterdir()) == []
        else:
            break
    assert content(tmp_path / "policy") == files_of(1)


@pytest.mark.usefixtures("small_ranges")
def test_only_what_changed_is_fetched(store: ObjectStore, tmp_path: Path) -> None:
    calls = Calls()
    checkpoints = Checkpoints(Watched(store, calls), RUN)
    first, second = publish(checkpoints, 1), publish(checkpoints, 2)
    config = f"/objects/{first.files['weights/config.json'].sha256}"
    checkpoints.fetch(first, "", tmp_path / "1")
    checkpoints.fetch(second, "", tmp_path / "2")
    assert calls.of("get", config) == 1
    assert content(tmp_path / "2") == files_of(2)
    assert {p.name for p in (tmp_path / ".objects").iterdir()} == {file.sha256 for file in second.files.values()}
    (tmp_path / "1" / "weights/config.json").write_bytes(b"spoilt in place, and so in the cache")
    checkpoints.fetch(second, "", tmp_path / "3")
    assert content(tmp_path / "3") == files_of(2)
    assert calls.of("get", config) == 2


@pytest.mark.usefixtures("small_ranges")
def test_a_directory_that_is_there_is_checked_and_completed(store: ObjectStore, tmp_path: Path) -> None:
    calls = Calls()
    checkpoints = Checkpoints(Watched(store, calls), RUN)
    manifest = publish(checkpoints, 1)
    target = tmp_path / "policy"
    checkpoints.fetch(manifest, "weights/", target)
    made = len(calls.made)
    checkpoints.fetch(manifest, "weights/", target)
    assert len(calls.made) == made
    checkpoints.fetch(manifest, "", target)
    assert content(target) == files_of(1)
    (target / WEIGHTS).unlink()
    (target / WEIGHTS).write_bytes(b"\0" * 3500)
    checkpoints.fetch(manifest, "weights/", target)
    assert content(target)[WEIGHTS] == files_of(1)[WEIGHTS]
    with pytest.raises(CheckpointError, match="no files under 'optimizer/'"):
        checkpoints.fetch(manifest, "optimizer/", target)


@pytest.mark.usefixtures("small_ranges")
def test_fetches_of_one_checkpoint_at_once_agree(store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, RUN)
    manifest = publish(checkpoints, 1)
    with ThreadPoolExecutor(4) as pool:
        fetches = [pool.submit(checkpoints.fetch, manifest, "", tmp_path / "policy") for _ in range(4)]
        assert [fetch.result() for fetch in fetches] == [None] * 4
    assert content(tmp_path / "policy") == files_of(1)
    assert {p.name for p in tmp_path.iterdir()} == {"policy", ".objects"}


def test_collection_keeps_what_is_needed(store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, RUN)
    manifests = [publish(checkpoints, version) for version in (1, 2, 3, 4)]
    assert checkpoints.collect([2]).objects == 0
    collected = checkpoints.collect([2], grace=0.0)
    assert (collected.objects, collected.size) == (2, 7000)
    for kept in (manifests[1], manifests[3]):
        checkpoints.fetch(kept, "", tmp_path / str(kept.version))
    with pytest.raises(CheckpointError, match="was collected"):
        checkpoints.fetch(manifests[0], "", tmp_path / "1")
    assert checkpoints.versions() == [1, 2, 3, 4]
    assert [m.version for m in checkpoints.lineage(4)] == [4, 3, 2, 1]


def test_collection_stops_before_it_deletes_what_it_cannot_judge(store: ObjectStore) -> None:
    checkpoints = Checkpoints(store, RUN)
    publish(checkpoints, 1)
    publish(checkpoints, 2)
    before = object_keys(store)
    with pytest.raises(CheckpointError, match="no checkpoint of policy 9"):
        checkpoints.collect([9], grace=0.0)
    store.put(checkpoints.manifest_key(2), b"{}")
    with pytest.raises(CheckpointError):
        checkpoints.collect([1], grace=0.0)
    assert object_keys(store) == before


def test_abandoned_uploads_are_aborted(memory_store: MemoryStore) -> None:
    checkpoints = Checkpoints(memory_store, RUN)
    publish(checkpoints, 1)
    mine = memory_store.begin(f"{RUN}/objects/abc")
    foreign = memory_store.begin("other-run/objects/abc")
    assert checkpoints.collect([]).uploads == 0
    assert checkpoints.collect([], grace=0.0).uploads == 1
    assert memory_store.uploads() == [foreign]
    assert mine.upload_id != foreign.upload_id


def test_a_damaged_manifest_is_named(store: ObjectStore) -> None:
    checkpoints = Checkpoints(store, RUN)
    first, second = publish(checkpoints, 1), publish(checkpoints, 2)
    assert checkpoints.manifest(1, digest=manifest_digest(first)) == first
    with pytest.raises(DigestMismatch, match=r"run-1/checkpoints/1/manifest\.json: expected SHA-256"):
        checkpoints.manifest(1, digest=manifest_digest(second))
    store.put(checkpoints.manifest_key(1), store.get(checkpoints.manifest_key(2)).data)
    with pytest.raises(CheckpointError, match="belongs to run run-1, policy 2"):
        checkpoints.manifest(1)
    store.put(checkpoints.manifest_key(2), encode_manifest(replace(second, step=0)))
    with pytest.raises(DigestMismatch):
        checkpoints.latest()
    store.delete(checkpoints.manifest_key(2))
    with pytest.raises(CheckpointError, match="no checkpoint of policy 2"):
        checkpoints.latest()


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"version": "1"}', b"[" * 100_000])
def test_a_broken_pointer_is_an_error_and_never_no_checkpoint(memory_store: MemoryStore, data: bytes) -> None:
    checkpoints = Checkpoints(memory_store, RUN)
    publish(checkpoints, 1)
    memory_store.put(f"{RUN}/latest.json", data)
    for use in (checkpoints.latest, lambda: checkpoints.claim("b"), lambda: publish(checkpoints, 2)):
        with pytest.raises(CheckpointError, match=r"run-1/latest\.json is no pointer"):
            use()
    with pytest.raises(NotFound):
        memory_store.get(checkpoints.manifest_key(2))


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    manifest = publish(Checkpoints(MemoryStore(), RUN), 1)
    data = encode_manifest(manifest)
    assert decode_manifest(data, key="k") == manifest
    for position in range(len(data)):
        spoilt = bytearray(data)
        spoilt[position] ^= 1 << (position % 8)
        with pytest.raises(CheckpointError, match="k is no whole manifest"):
            decode_manifest(bytes(spoilt), key="k")
    for cut in range(0, len(data), 7):
        with pytest.raises(CheckpointError):
            decode_manifest(data[:cut], key="k")


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", "a/", ".", "a\\b", "a\0b"])
def test_a_file_name_that_leaves_the_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a relative path"):
        publish(Checkpoints(MemoryStore(), RUN), 1, files={name: b"x"})


@pytest.mark.parametrize("run", ["", "a/b", "..", ".a", "a b", "a\n"])
def test_a_run_is_one_part_of_a_key(run: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        Checkpoints(MemoryStore(), run)


@pytest.mark.parametrize(("version", "parent"), [(0, None), (3, 3), (3, 4), (3, 0), (-1, None)])
def test_a_parent_is_older(version: int, parent: int | None) -> None:
    with pytest.raises(ValueError, match="expected 1 <= parent < version"):
        Checkpoints(MemoryStore(), RUN).publish(version, files_of(1), parent=parent, incarnation="a", step=1)


class Careless(MemoryStore):
    """Ignores the headers of conditional writes."""

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        return super().put(key, data)


def test_a_careless_store_is_refused(store: ObjectStore) -> None:
    Checkpoints(store, RUN).probe()
    assert store.list() == []
    with pytest.raises(StoreError, match="ignores conditional writes"):
        Checkpoints(Careless(), RUN).probe()
