"""What a running stack offers, and how it says that something is wrong."""

import json
from dataclasses import dataclass, field
from typing import Literal

from ...schemas.errors import RollstreamError

Broker = Literal["tansu", "kafka"]
GroupProtocol = Literal["classic", "consumer"]


class StackError(RollstreamError):
    """The local stack could not do what was asked; the message quotes the server's log where it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where the servers of a stack answer, all on loopback."""

    bootstrap: str
    """Kafka bootstrap servers, "127.0.0.1:P" or several, comma-separated."""
    broker: Broker
    s3_url: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str
    """For runs; it exists."""
    group_protocol: GroupProtocol
    """What consumers should set as `group.protocol`."""

    def to_toml(self) -> str:
        """A configuration file that points at these endpoints."""
        lines = [
            "# Written by the local stack, removed when it is stopped.",
            "[kafka]",
            f"bootstrap = {json.dumps(self.bootstrap)}",
            f"group_protocol = {json.dumps(self.group_protocol)}",
            "",
            "[store]",
            f"url = {json.dumps(self.s3_url)}",
            f"bucket = {json.dumps(self.bucket)}",
            'region = "us-east-1"',
            f"access_key = {json.dumps(self.access_key)}",
            f"secret_key = {json.dumps(self.secret_key)}",
        ]
        return "\n".join(lines) + "\n"


class AlreadyUp(StackError):
    """A stack runs in this folder; `endpoints` says where it answers."""

    def __init__(self, message: str, endpoints: Endpoints) -> None:
        super().__init__(message)
        self.endpoints = endpoints
