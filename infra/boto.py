"""boto3 behind a typed border: the client, and what its many exceptions mean."""

from typing import Any, Protocol, cast

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError, SSLError
from botocore.exceptions import ConnectionError as NoConnection

from .store import Lost, NotFound, StoreError

BotoError = (BotoCoreError, ClientError)
"""What the client raises."""
BUSY = {408, 429, 500, 502, 503, 504}
CONFLICT, GONE, UNMET, OUTSIDE = 409, 404, 412, 416


class S3Client(Protocol):
    """The part of boto3's S3 client that is used here; it answers with dictionaries."""

    def list_buckets(self) -> Any: ...
    def create_bucket(self, *, Bucket: str) -> Any: ...
    def put_object(self, *, Bucket: str, Key: str, Body: bytes, IfNoneMatch: str = ..., IfMatch: str = ...) -> Any: ...
    def get_object(self, *, Bucket: str, Key: str, Range: str = ..., IfMatch: str = ...) -> Any: ...
    def head_object(self, *, Bucket: str, Key: str) -> Any: ...
    def delete_object(self, *, Bucket: str, Key: str) -> Any: ...
    def list_objects_v2(self, *, Bucket: str, Prefix: str, ContinuationToken: str = ...) -> Any: ...
    def create_multipart_upload(self, *, Bucket: str, Key: str) -> Any: ...
    def upload_part(self, *, Bucket: str, Key: str, UploadId: str, PartNumber: int, Body: bytes) -> Any: ...
    def complete_multipart_upload(self, *, Bucket: str, Key: str, UploadId: str, MultipartUpload: Any) -> Any: ...
    def abort_multipart_upload(self, *, Bucket: str, Key: str, UploadId: str) -> Any: ...
    def list_multipart_uploads(
        self, *, Bucket: str, Prefix: str, KeyMarker: str = ..., UploadIdMarker: str = ...
    ) -> Any: ...
    def close(self) -> None: ...


def connect_client(
    url: str | None,
    *,
    access_key: str | None = None,
    secret_key: str | None = None,
    region: str = "us-east-1",
    timeout: float = 30.0,
) -> S3Client:
    """A client that tries once; without a URL it is AWS, without keys the usual chain finds them."""
    loopback = url is not None and url.startswith(("http://127.", "http://localhost", "http://[::1]"))
    config = Config(
        connect_timeout=min(5.0, timeout),
        read_timeout=timeout,
        retries={"total_max_attempts": 1},
        max_pool_connections=32,
        s3={"addressing_style": "path" if url else "auto"},
        # Not every S3 server knows the newer checksums; digests are checked on the floors above.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # A proxy of the environment has no way to this machine's loopback.
        proxies={} if loopback else None,
    )
    client = cast(Any, Session()).client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=config,
    )
    return cast(S3Client, client)


def http_status(error: BaseException) -> int:
    """The HTTP status that the store answered with; 0 where it did not answer."""
    if not isinstance(error, ClientError):
        return 0
    return int(cast(Any, error).response["ResponseMetadata"].get("HTTPStatusCode", 0))


def error_code(error: BaseException) -> str:
    """The store's own name for an error, "NoSuchKey" for one; "" where it did not answer."""
    return str(cast(Any, error).response["Error"].get("Code", "")) if isinstance(error, ClientError) else ""


def translate_error(error: BaseException, what: str, *, conditional: bool = False) -> StoreError:
    """What a failure of boto3 means to the caller; `what` says what was tried."""
    status, code = http_status(error), error_code(error)
    if code == "NoSuchBucket":
        return StoreError(f"{what}: the bucket does not exist; create it, or set store.bucket to one that does")
    if conditional and status in (GONE, UNMET):
        return Lost(f"{what}: another writer was first ({code or status})")
    if status == GONE:
        return NotFound(f"{what}: there is no such object")
    if status in (401, 403):
        return StoreError(f"{what}: the store refuses these credentials ({code or status}); check store.access_key")
    return StoreError(f"{what}: {error}", retriable=_is_passing(error, status))


def _is_passing(error: BaseException, status: int) -> bool:
    if isinstance(error, ClientError):
        return status in BUSY or status == CONFLICT
    return isinstance(error, (HTTPClientError, IncompleteReadError, NoConnection)) and not isinstance(error, SSLError)
