"""The object store over S3's API (boto3)."""

from typing import Any, Protocol, cast

import boto3
from botocore.config import Config as BotoConfig


class S3Client(Protocol):
    """The part of boto3's S3 client that is used here."""

    def list_buckets(self) -> Any: ...
    def create_bucket(self, *, Bucket: str) -> Any: ...


def connect_client(
    url: str | None,
    *,
    access_key: str | None = None,
    secret_key: str | None = None,
    region: str = "us-east-1",
    timeout: float = 30.0,
) -> S3Client:
    """A boto3 client. Retries are the caller's, so that he knows whether an earlier attempt may have gone through."""
    loopback = url is not None and url.startswith(("http://127.", "http://localhost", "http://[::1]"))
    config = BotoConfig(
        connect_timeout=min(5.0, timeout),
        read_timeout=timeout,
        retries={"total_max_attempts": 1},
        max_pool_connections=32,
        s3={"addressing_style": "path"},
        # Newer checksums are not understood by every S3 server; digests are checked above.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        proxies={} if loopback else None,
    )
    session = boto3.session.Session()
    client = session.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=config,
    )
    return cast(S3Client, client)
