"""What the control topic asks of a worker: environments that pause, groups that are cancelled."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from ..infra.log import Log, Record
from ..infra.topics import Names
from ..schemas import Command, Control, Schemas, Task, WireError, decode_as
from .learning import learn_schema
from .polling import Poller, open_end

logger = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Cancelled groups that are remembered, for tasks that have not been read yet."""


class Orders:
    """The orders in force: those given since the worker began to follow. For one event loop."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._paused: set[str] = set()
        self._cancelled: dict[str, Control] = {}
        self.following = asyncio.Event()
        """Set from when on no order is missed."""

    @property
    def all_paused(self) -> bool:
        """No new tasks of any environment."""
        return "" in self._paused

    def paused(self, environment: str) -> bool:
        return self.all_paused or environment in self._paused

    def cancelled(self, task: Task) -> str | None:
        """Why this task is to be aborted; None to play it. One made after the order is another one."""
        control = self._cancelled.get(task.task_id)
        if control is None or task.created_ms > control.issued_ms > 0:
            return None
        return control.reason or "cancelled"

    async def follow(self, log: Log, names: Names, changed: Callable[[], None]) -> None:
        """Obey every order from now on, and tell of each that changed something. Raises `LogError`."""
        async with Poller(partial(open_end, log, names.control)) as poller:
            self.following.set()
            while True:
                records = await poller.poll(100, 0.5)
                for record in records:
                    await learn_schema(self._schemas, record.value or b"")
                if sum(self.obey(record) for record in records):
                    changed()

    def obey(self, record: Record) -> bool:
        """Take one order; False for what is none."""
        if record.value is None:
            return False
        try:
            control = decode_as(Control, record.value, schemas=self._schemas)
        except WireError as error:
            logger.warning("%s is no control record: %s", record.position, error)
            return False
        logger.info("%s %s: %s", control.command.lower(), control.target or "all", control.reason)
        match control.command:
            case Command.PAUSE:
                self._paused.add(control.target)
            case Command.RESUME if not control.target:
                self._paused.clear()
            case Command.RESUME:
                self._paused.discard(control.target)
            case Command.CANCEL:
                self._cancelled[control.target] = control
                if len(self._cancelled) > REMEMBERED:
                    del self._cancelled[next(iter(self._cancelled))]
        return True
