"""A look now and then, beside the work, whether this trainer still has the run.

An idle trainer publishes nothing, and so would never learn that another one took the run: the two would share the
partitions between them, and neither might ever fill a step.
"""

import logging
import threading
import time
from collections.abc import Callable

from ..infra.store import StoreError

logger = logging.getLogger(__name__)

EVERY = 5.0
"""Seconds between two looks."""


class Watch:
    """Used by one thread; the looks are made by others, since a store that is away takes its time."""

    def __init__(self, look: Callable[[], None], *, every: float | None = None) -> None:
        """`look` raises what is wrong. That the store does not answer is no news: the next publish tells."""
        self._look, self._every = look, EVERY if every is None else every
        self._thread: threading.Thread | None = None
        self._due = time.monotonic() + self._every
        self._found: Exception | None = None

    def check(self) -> None:
        """Never waits. Raises what the last look raised."""
        if self._found is not None:
            raise self._found
        if time.monotonic() < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = time.monotonic() + self._every
        self._thread = threading.Thread(target=self._run, name="rollstream-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._look()
        except StoreError as error:
            logger.info("whether another trainer took the run is not known: %s", error)
        except Exception as error:  # noqa: BLE001 - handed to the thread that checks
            self._found = error
