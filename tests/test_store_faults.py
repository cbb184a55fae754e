"""S3Store when the store fails: a proxy before SeaweedFS refuses, hangs, forgets to answer, cuts answers short."""

import http.client
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from rollstream.infra.config import StoreSection
from rollstream.infra.s3 import S3Store
from rollstream.infra.stack import LocalStack
from rollstream.infra.store import Lost, StoreError

PART = 5 << 20


class Handler(BaseHTTPRequestHandler):
    """Passes a request on, unless a fault is due."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def serve(self) -> None:
        proxy = cast(Proxy, self.server)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.next_fault(self)(self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    def forward(self) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", cast(Proxy, self.server).target, timeout=20)
        connection.request(self.command, self.path, self.body, dict(self.headers.items()))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer, data

    def answer(self, status: int, data: bytes, headers: list[tuple[str, str]], *, send: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", str(len(data)))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[:send])


Fault = Callable[[Handler], None]


def passing(handler: Handler) -> None:
    answer, data = handler.forward()
    handler.answer(answer.status, data, answer.getheaders())


def refusing(status: int, code: str) -> Fault:
    body = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
    return lambda handler: handler.answer(status, body, [("Content-Type", "application/xml")])


def dropping(handler: Handler) -> None:
    """The request never reaches the store."""
    handler.close_connection = True


def forgetting(handler: Handler) -> None:
    """The store does it, the answer is lost."""
    handler.forward()
    handler.close_connection = True


def cutting(handler: Handler) -> None:
    """The answer ends in the middle."""
    answer, data = handler.forward()
    handler.answer(answer.status, data, answer.getheaders(), send=len(data) // 2)
    handler.close_connection = True


def hanging(handler: Handler) -> None:
    """No answer for as long as the client cares."""
    cast(Proxy, handler.server).released.wait(20)
    handler.close_connection = True


class Proxy(ThreadingHTTPServer):
    """Faults are used up in order, each by the next request that it is for; then everything passes."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.released = threading.Event()
        self.requests: list[str] = []
        self._faults: list[tuple[str, Fault]] = []
        self._lock = threading.Lock()

    def add(self, *faults: Fault, on: str = "") -> None:
        """`on`: only for requests whose "METHOD path" holds this."""
        self._faults += [(on, fault) for fault in faults]

    def next_fault(self, handler: Handler) -> Fault:
        line = f"{handler.command} {handler.path}"
        with self._lock:
            self.requests.append(line)
            for index, (on, fault) in enumerate(self._faults):
                if on in line:
                    del self._faults[index]
                    return fault
        return passing

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nothing to tell."""


@pytest.fixture
def proxy(stack_tansu: LocalStack) -> Iterator[Proxy]:
    with Proxy(int(stack_tansu.endpoints.s3_url.rsplit(":", 1)[1])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def faulty(proxy: Proxy, stack_tansu: LocalStack, s3_store: S3Store) -> Iterator[S3Store]:
    """The same objects as `s3_store`, through the proxy."""
    ends = stack_tansu.endpoints
    prefix = repr(s3_store).split("prefix='")[1].split("'")[0]
    store = S3Store(
        ends.bucket,
        url=f"http://127.0.0.1:{proxy.server_port}",
        access_key=ends.access_key,
        secret_key=ends.secret_key,
        prefix=prefix,
        timeout=1.0,
        patience=5.0,
    )
    yield store
    store.close()


PASSING_FAULTS = [
    refusing(500, "InternalError"),
    refusing(503, "SlowDown"),
    refusing(429, "TooManyRequests"),
    dropping,
    hanging,
]
IDS = ["500", "503", "429", "connection lost", "timeout"]


@pytest.mark.parametrize("fault", PASSING_FAULTS, ids=IDS)
def test_what_passes_is_retried(faulty: S3Store, proxy: Proxy, fault: Fault) -> None:
    proxy.add(fault)
    etag = faulty.put("a", b"data")
    proxy.add(fault)
    assert faulty.get("a") == (b"data", etag)
    proxy.add(fault)
    assert [entry.key for entry in faulty.list()] == ["a"]
    assert len(proxy.requests) == 6


def test_what_lasts_is_an_error_that_may_be_tried_again(
    faulty: S3Store, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.add(*[refusing(503, "SlowDown")] * 100)
    with (
        caplog.at_level(logging.INFO, "rollstream"),
        pytest.raises(StoreError, match=r"writing a: .*SlowDown") as caught,
    ):
        faulty.put("a", b"data")
    assert caught.value.retriable
    assert 4 < len(proxy.requests) < 20
    assert "again in about" in caplog.text


def test_store_that_is_away_is_an_error_that_may_be_tried_again() -> None:
    store = S3Store("b", url="http://127.0.0.1:1", access_key="k", secret_key="s", patience=0.3)
    with pytest.raises(StoreError) as caught:
        store.head("a")
    assert caught.value.retriable
    store.close()


def test_answer_cut_short_is_read_again(faulty: S3Store, proxy: Proxy) -> None:
    data = bytes(range(256)) * 4000
    etag = faulty.put("a", data)
    proxy.add(cutting, on="GET")
    assert faulty.get("a") == (data, etag)
    assert len(proxy.requests) == 3


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "InvalidArgument"), (403, "AccessDenied"), (404, "NoSuchBucket"), (501, "Unknown")],
)
def test_what_does_not_pass_is_told_at_once(faulty: S3Store, proxy: Proxy, status: int, code: str) -> None:
    proxy.add(refusing(status, code))
    with pytest.raises(StoreError) as caught:
        faulty.put("a", b"data", if_none_match=True)
    assert not caught.value.retriable
    assert not isinstance(caught.value, Lost)
    assert len(proxy.requests) == 1


def test_wrong_keys_are_told_without_them(stack_tansu: LocalStack) -> None:
    ends = stack_tansu.endpoints
    store = S3Store(ends.bucket, url=ends.s3_url, access_key=ends.access_key, secret_key="hunter2")
    with pytest.raises(StoreError, match=r"refuses these credentials.*store\.access_key") as caught:
        store.get("a")
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r} {store!r}"
    store.close()


# ---------------------------------------------------------------------- conditional writes


@pytest.mark.parametrize(("status", "code"), [(412, "PreconditionFailed"), (404, "NoSuchKey")], ids=["412", "404"])
def test_refusals_of_a_condition_both_mean_lost(faulty: S3Store, proxy: Proxy, status: int, code: str) -> None:
    proxy.add(refusing(status, code))
    with pytest.raises(Lost):
        faulty.put("a", b"data", if_match='"some etag"')
    assert len(proxy.requests) == 1


def test_conflict_is_tried_again(faulty: S3Store, proxy: Proxy) -> None:
    proxy.add(*[refusing(409, "ConditionalRequestConflict")] * 3)
    etag = faulty.put("a", b"data", if_none_match=True)
    assert faulty.head("a").etag == etag
    assert len(proxy.requests) == 5


def test_own_write_whose_answer_was_lost_is_won(faulty: S3Store, proxy: Proxy) -> None:
    proxy.add(forgetting)
    first = faulty.put("a", b"first", if_none_match=True)
    assert faulty.get("a") == (b"first", first)
    proxy.add(forgetting)
    second = faulty.put("a", b"second", if_match=first)
    assert faulty.get("a") == (b"second", second)


@pytest.mark.parametrize("creating", [True, False])
def test_foreign_write_during_a_retry_is_lost(faulty: S3Store, proxy: Proxy, s3_store: S3Store, creating: bool) -> None:
    first = None if creating else s3_store.put("a", b"first")

    def interfere(handler: Handler) -> None:
        s3_store.put("a", b"the other's")
        dropping(handler)

    proxy.add(interfere)
    with pytest.raises(Lost):
        faulty.put("a", b"mine", if_none_match=creating, if_match=first)
    assert s3_store.get("a").data == b"the other's"


def test_equal_bytes_of_another_do_not_count_without_a_lost_answer(faulty: S3Store) -> None:
    faulty.put("a", b"same", if_none_match=True)
    with pytest.raises(Lost):
        faulty.put("a", b"same", if_none_match=True)


# ---------------------------------------------------------------------- large files


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three parts."""
    monkeypatch.setattr("rollstream.infra.s3.PART", PART)
    path = tmp_path / "large"
    path.write_bytes(b"a" * PART + b"b" * PART + b"c" * 1000)
    return path


def test_parts_are_retried(faulty: S3Store, proxy: Proxy, large: Path) -> None:
    proxy.add(refusing(503, "SlowDown"), on="partNumber=2")
    proxy.add(dropping, on="partNumber=3")
    faulty.put_file("large", large)
    assert faulty.get("large").data == large.read_bytes()


@pytest.mark.parametrize("place", ["partNumber=2", "POST /rollstream/test"], ids=["part", "completion"])
def test_failed_upload_leaves_no_parts(faulty: S3Store, proxy: Proxy, large: Path, place: str) -> None:
    if "POST" in place:
        proxy.add(passing, on=place)
    proxy.add(refusing(400, "InvalidPart"), on=place)
    with pytest.raises(StoreError, match="InvalidPart"):
        faulty.put_file("large", large)
    assert list(faulty.uploads()) == []
    assert list(faulty.list()) == []


def test_interrupted_upload_leaves_no_parts(faulty: S3Store, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(faulty, "_complete", interrupt)
    with pytest.raises(KeyboardInterrupt):
        faulty.put_file("large", large)
    assert list(faulty.uploads()) == []


def test_upload_that_cannot_be_aborted_is_reported(
    faulty: S3Store, proxy: Proxy, large: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.add(refusing(400, "InvalidPart"), on="partNumber=1")
    proxy.add(refusing(403, "AccessDenied"), on="DELETE")
    with pytest.raises(StoreError, match="InvalidPart"):
        faulty.put_file("large", large)
    assert "parts of large stay in the store" in caplog.text
    (left,) = faulty.uploads()
    faulty.abort(left)


def test_completion_whose_answer_was_lost_counts(faulty: S3Store, proxy: Proxy, large: Path) -> None:
    proxy.add(passing, forgetting, on="POST")
    etag = faulty.put_file("large", large)
    assert faulty.head("large").etag == etag
    assert faulty.get("large").data == large.read_bytes()


def test_object_replaced_while_it_is_read_is_no_mixture(
    faulty: S3Store, proxy: Proxy, s3_store: S3Store, large: Path
) -> None:
    faulty.put_file("large", large)
    target = large.with_name("target")

    def replace(handler: Handler) -> None:
        s3_store.put("large", b"z" * (2 * PART))
        passing(handler)

    proxy.add(passing, replace, on="GET")
    with pytest.raises(StoreError, match="replaced meanwhile"):
        faulty.get_file("large", target)
    assert [path.name for path in target.parent.iterdir()] == ["large"]


# ---------------------------------------------------------------------- configuration


def test_store_of_the_configuration(stack_tansu: LocalStack, s3_store: S3Store) -> None:
    ends = stack_tansu.endpoints
    s3_store.put("a", b"data")
    prefix = repr(s3_store).split("prefix='")[1].split("'")[0]
    values = {"url": ends.s3_url, "access_key": ends.access_key, "secret_key": ends.secret_key, "prefix": prefix}
    store = S3Store.from_config(StoreSection.model_validate(values, strict=False))
    assert store.get("a").data == b"data"
    assert ends.secret_key not in f"{store!r} {ends!r} {vars(store)!r}"
    with suppress(StoreError):
        store.close()
