"""Log lines on the terminal: warnings, or more with -v; what a client repeats while a broker is away is said rarely."""

import logging
import time

CLIENT = "rollstream.infra.kafka.client"
"""Logger of the Kafka client's own lines, which repeat every second while it cannot connect."""
REPEAT = 30.0
"""Seconds between two lines of the same kind from the client."""


def configure_logging(verbose: int) -> None:
    """0: warnings, 1: rollstream in more detail and others' news, 2 or more: everything of rollstream."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.getLogger("rollstream").setLevel(level)
    if not verbose:
        logging.getLogger(CLIENT).addFilter(Seldom(REPEAT))


class Seldom(logging.Filter):
    """Lets one record of a kind pass in so many seconds; the kind is its first argument, the client's name for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._passed: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
        now = time.monotonic()
        if now - self._passed.get(kind, float("-inf")) < self._seconds:
            return False
        self._passed[kind] = now
        return True
