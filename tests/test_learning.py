"""Schemas looked up beside the event loop: nobody waits for them but the record itself."""

import asyncio
import json
import struct
from collections.abc import Callable

import pytest

from rollstream.infra.log import Log
from rollstream.infra.memory import MemoryLog
from rollstream.infra.topics import Names, declared
from rollstream.producers import learning
from rollstream.producers.learning import learn_schema
from rollstream.producers.orders import Orders
from rollstream.schemas import (
    Command,
    Control,
    SchemaAway,
    Schemas,
    UnknownSchema,
    encode,
    record_schemas,
)

CONTROL = next(shipped for shipped in record_schemas() if shipped.name == "control.v1")
PATIENCE = 20.0


class Shelf:
    """A lookup that is away until told."""

    def __init__(self) -> None:
        self.away = True
        self.asked = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.texts = {7: CONTROL.text}

    def fetch(self, schema_id: int) -> str:
        self.loop.call_soon_threadsafe(self.asked.set)
        if self.away:
            raise SchemaAway("the registry is away")
        if schema_id not in self.texts:
            raise UnknownSchema("nobody has it")
        return self.texts[schema_id]


def frame(schema_id: int, control: Control) -> bytes:
    return struct.pack(">BI", 0, schema_id) + encode(control)[5:]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RETRY", 0.01)


async def test_waits_until_somebody_answers() -> None:
    shelf = Shelf()
    schemas = Schemas(shelf)
    waiting = asyncio.create_task(learn_schema(schemas, frame(7, Control(command=Command.PAUSE))))
    await asyncio.wait_for(shelf.asked.wait(), PATIENCE)
    assert not waiting.done()
    shelf.away = False
    await asyncio.wait_for(waiting, PATIENCE)
    assert schemas.settled(7)


async def test_what_nobody_has_and_what_is_no_frame() -> None:
    shelf = Shelf()
    shelf.away = False
    schemas = Schemas(shelf)
    await learn_schema(schemas, frame(8, Control(command=Command.PAUSE)))
    assert schemas.settled(8)
    shelf.away = True
    for data in (b"", b"\x01junk", encode(Control(command=Command.PAUSE)), struct.pack(">BI", 0, 0) + b"x"):
        await asyncio.wait_for(learn_schema(schemas, data), PATIENCE)


async def test_orders_of_another_release_are_obeyed_in_order() -> None:
    """A registry that is away delays an order; it does not lose it, nor let a later one pass."""
    log, names = MemoryLog(), Names("m")
    for topic in declared("m", {}):
        log.create(topic)
    shelf = Shelf()
    orders, changes = Orders(Schemas(shelf)), asyncio.Event()
    following = asyncio.create_task(orders.follow(log, names, changes.set))
    await asyncio.wait_for(orders.following.wait(), PATIENCE)
    append(log, names, frame(7, Control(command=Command.PAUSE)))
    append(log, names, encode(Control(command=Command.PAUSE, target="maze")))
    await asyncio.wait_for(shelf.asked.wait(), PATIENCE)
    assert not orders.all_paused
    shelf.away = False
    await until(lambda: orders.all_paused and orders.paused("maze"), changes)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def append(log: Log, names: Names, value: bytes) -> None:
    with log.writer() as writer:
        writer.append(names.control, value, key=json.dumps(len(value)).encode()).result(PATIENCE)


async def until(met: Callable[[], bool], changed: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        while not met():
            await changed.wait()
            changed.clear()
