"""The object store over S3's API.

Retries are made here and not in boto3, because a conditional write has to know of them: where the answer to the first
attempt was lost, the second one finds its own write in place, is refused, and has to look whose it was.
"""

import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .boto import OUTSIDE, UNMET, BotoError, connect_client, error_code, http_status, translate_error
from .store import Content, Entry, Lost, NotFound, StoreError, Upload

if TYPE_CHECKING:
    from .sections import StoreSection

logger = logging.getLogger(__name__)

T = TypeVar("T")

PART = 16 << 20
"""Bytes of a part, at least; a file of more than one part is moved in several, a few at the same time."""
MOST_PARTS = 10_000
MOVERS = 4
LONGEST_PAUSE = 5.0


class S3Store:
    """One bucket of an S3-compatible store, or what lies under a prefix of it. Thread-safe."""

    def __init__(
        self,
        bucket: str,
        *,
        url: str | None = None,
        region: str = "us-east-1",
        access_key: str | None = None,
        secret_key: str | None = None,
        prefix: str = "",
        timeout: float = 30.0,
        patience: float = 60.0,
    ) -> None:
        """`timeout` (s) is for one answer, `patience` (s) for all attempts of a call. No keys: AWS's usual chain."""
        self._client = connect_client(url, access_key=access_key, secret_key=secret_key, region=region, timeout=timeout)
        self._bucket, self._url, self._prefix = bucket, url, prefix
        self._patience = patience

    @classmethod
    def from_config(cls, settings: "StoreSection") -> Self:
        secret = settings.secret_key
        return cls(
            settings.bucket,
            url=settings.url,
            region=settings.region,
            access_key=settings.access_key,
            secret_key=secret.get_secret_value() if secret else None,
            prefix=settings.prefix,
        )

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r}, url={self._url!r}, prefix={self._prefix!r})"

    def put(self, key: str, data: bytes, *, if_none_match: bool = False, if_match: str | None = None) -> str:
        condition = ({"IfNoneMatch": "*"} if if_none_match else {}) | ({"IfMatch": if_match} if if_match else {})
        body = bytes(data)

        def attempt(doubtful: bool) -> str:
            try:
                return str(self._client.put_object(**self._at(key), Body=body, **condition)["ETag"])
            except BotoError as error:
                meaning = translate_error(error, f"writing {key}", conditional=bool(condition))
                if doubtful and isinstance(meaning, Lost) and (own := self._find_equal(key, body)):
                    return own
                raise meaning from error

        return self._persist(attempt)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> Content:
        if length == 0:
            return Content(b"", self.head(key).etag)
        last = "" if length is None else str(start + length - 1)
        span = {} if start == 0 and length is None else {"Range": f"bytes={start}-{last}"}
        return self._persist(lambda _: self._read(key, **span))

    def head(self, key: str) -> Entry:
        told = self._request(f"looking up {key}", self._client.head_object, **self._at(key))
        return Entry(key, int(told["ContentLength"]), told["ETag"], _utc(told["LastModified"]))

    def list(self, prefix: str = "") -> Sequence[Entry]:
        pages = self._pages(self._client.list_objects_v2, prefix, {"ContinuationToken": "NextContinuationToken"})
        entries = (
            Entry(self._own_key(told["Key"]), int(told["Size"]), told["ETag"], _utc(told["LastModified"]))
            for page in pages
            for told in page.get("Contents", ())
        )
        return sorted(entries)

    def delete(self, key: str) -> None:
        self._request(f"deleting {key}", self._client.delete_object, **self._at(key))

    def put_file(self, key: str, path: Path) -> str:
        size = path.stat().st_size
        if size <= PART:
            return self.put(key, path.read_bytes())
        upload = self.begin(key)
        try:
            return self._complete(upload, self._send_parts(upload, path, size), size)
        except BaseException:  # whatever ended it, Ctrl-C too: parts of an unfinished upload cost space for ever
            self._abandon(upload)
            raise

    def get_file(self, key: str, path: Path) -> Entry:
        entry = self.head(key)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.draft")
        try:
            with draft.open("wb") as out, ThreadPoolExecutor(MOVERS) as pool:
                out.truncate(entry.size)
                moves = [pool.submit(self._fetch_part, entry, out.fileno(), at) for at in range(0, entry.size, PART)]
                for move in moves:
                    move.result()
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return entry

    def begin(self, key: str) -> Upload:
        """Begin a multipart upload, as `put_file` does for a large file."""
        told = self._request(f"beginning {key}", self._client.create_multipart_upload, **self._at(key))
        return Upload(key, told["UploadId"], datetime.now(UTC))

    def uploads(self, prefix: str = "") -> Sequence[Upload]:
        follow = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        pages = self._pages(self._client.list_multipart_uploads, prefix, follow)
        return [
            Upload(self._own_key(told["Key"]), told["UploadId"], _utc(told["Initiated"]))
            for page in pages
            for told in page.get("Uploads", ())
        ]

    def abort(self, upload: Upload) -> None:
        target = {**self._at(upload.key), "UploadId": upload.upload_id}
        with suppress(NotFound):
            self._request(f"aborting {upload.key}", self._client.abort_multipart_upload, **target)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # ------------------------------------------------------------------ parts of a large file

    def _send_parts(self, upload: Upload, path: Path, size: int) -> Sequence[Mapping[str, object]]:
        step = max(PART, -(-size // MOST_PARTS))
        with path.open("rb") as source, ThreadPoolExecutor(MOVERS) as pool:
            starts = range(0, size, step)
            moves = [
                pool.submit(self._send_part, upload, source.fileno(), number, start, step)
                for number, start in enumerate(starts, 1)
            ]
            try:
                return [move.result() for move in moves]
            finally:
                pool.shutdown(cancel_futures=True)

    def _send_part(self, upload: Upload, source: int, number: int, start: int, length: int) -> Mapping[str, object]:
        body = os.pread(source, length, start)
        target = {**self._at(upload.key), "UploadId": upload.upload_id, "PartNumber": number}
        told = self._request(f"writing part {number} of {upload.key}", self._client.upload_part, **target, Body=body)
        return {"PartNumber": number, "ETag": told["ETag"]}

    def _complete(self, upload: Upload, parts: Sequence[Mapping[str, object]], size: int) -> str:
        target = {**self._at(upload.key), "UploadId": upload.upload_id}

        def attempt(doubtful: bool) -> str:
            try:
                return str(self._client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts})["ETag"])
            except BotoError as error:
                # Its answer was lost: the upload is gone because the object is there.
                if doubtful and error_code(error) == "NoSuchUpload" and (entry := self.head(upload.key)).size == size:
                    return entry.etag
                raise translate_error(error, f"completing {upload.key}") from error

        return self._persist(attempt)

    def _abandon(self, upload: Upload) -> None:
        try:
            self.abort(upload)
        except StoreError as error:
            logger.warning("parts of %s stay in the store until its upload is aborted: %s", upload.key, error)

    def _fetch_part(self, entry: Entry, out: int, start: int) -> None:
        span = {"Range": f"bytes={start}-{start + PART - 1}", "IfMatch": entry.etag}
        data = self._persist(lambda _: self._read(entry.key, **span)).data
        expected = min(PART, entry.size - start)
        if len(data) != expected:
            raise StoreError(
                f"reading {entry.key}: expected {expected} bytes at {start}, found {len(data)}", retriable=True
            )
        os.pwrite(out, data, start)

    # ------------------------------------------------------------------ requests

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _own_key(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _read(self, key: str, **options: str) -> Content:
        try:
            told = self._client.get_object(**self._at(key), **options)
            return Content(told["Body"].read(), told["ETag"])
        except BotoError as error:
            if http_status(error) == OUTSIDE:
                return Content(b"", self.head(key).etag)
            if http_status(error) == UNMET:
                raise StoreError(f"reading {key}: it was replaced meanwhile", retriable=True) from error
            raise translate_error(error, f"reading {key}") from error

    def _find_equal(self, key: str, body: bytes) -> str | None:
        """The ETag of the object if it holds these very bytes."""
        with suppress(NotFound):
            content = self.get(key)
            return content.etag if content.data == body else None
        return None

    def _request(self, what: str, request: Callable[..., Any], **arguments: object) -> Any:
        def attempt(_doubtful: bool) -> Any:
            try:
                return request(**arguments)
            except BotoError as error:
                raise translate_error(error, what) from error

        return self._persist(attempt)

    def _pages(self, request: Callable[..., Any], prefix: str, follow: Mapping[str, str]) -> Iterator[Any]:
        """Every page of a listing; `follow` says which field of an answer goes into which one of the next request."""
        where: dict[str, object] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._request(f"listing {prefix}*", request, **where)
            yield page
            if not page.get("IsTruncated"):
                return
            where |= {name: page[source] for name, source in follow.items()}

    def _persist(self, attempt: Callable[[bool], T]) -> T:
        """Call until it succeeds, fails for good, or patience ends; told whether an earlier call may have worked."""
        deadline = time.monotonic() + self._patience
        pause, doubtful = 0.1, False
        while True:
            try:
                return attempt(doubtful)
            except StoreError as error:
                if not error.retriable or time.monotonic() + pause > deadline:
                    raise
                logger.info("%s; again in about %.1f s", error, pause)
            doubtful = True
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)
