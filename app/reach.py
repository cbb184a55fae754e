"""A look whether anybody answers at all, before a client is opened that would wait long and say little."""

import socket
from urllib.parse import urlsplit

from ..schemas.errors import RollstreamError

PATIENCE = 3.0
"""Seconds for a server to accept a connection."""
STACK = "`rollstream up` starts a local stack"


class Unreachable(RollstreamError):
    """Nothing accepts connections where the configuration says."""


def reach_broker(bootstrap: str) -> None:
    """Raises `Unreachable` where none of the bootstrap servers accepts a connection."""
    reasons = [_knock(*_split(server)) for server in bootstrap.split(",")]
    if all(reasons):
        raise Unreachable(
            f"kafka.bootstrap: no broker answers at {bootstrap} ({reasons[0]}); {STACK}, "
            "or name your own: --set kafka.bootstrap=HOST:PORT"
        )


def reach_store(url: str | None) -> None:
    """Raises `Unreachable` where a store is named that does not accept a connection. None is AWS, and not asked."""
    if url is None:
        return
    place = urlsplit(url)
    if reason := _knock(place.hostname or "", place.port or (443 if place.scheme == "https" else 80)):
        raise Unreachable(f"store.url: no object store answers at {url} ({reason}); {STACK}, or name your own")


def _split(server: str) -> tuple[str, int]:
    """Host and port, as the client reads them: `[PROTOCOL://]HOST[:PORT]`, an IPv6 host in brackets."""
    place = urlsplit(server if "://" in server else f"//{server.strip()}")
    try:
        return place.hostname or "", place.port or 9092
    except ValueError:
        raise Unreachable(f"kafka.bootstrap: expected HOST:PORT, found {server.strip()!r}") from None


def _knock(host: str, port: int) -> str:
    """Why nobody opens; empty where somebody does."""
    try:
        with socket.create_connection((host, port), PATIENCE):
            return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()
