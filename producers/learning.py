"""Schemas of other releases, looked up beside the event loop."""

import asyncio
import logging

from ..schemas import SchemaAway, Schemas, UnknownSchema, framed_id

logger = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds until somebody who is away is asked again."""


async def learn_schema(schemas: Schemas, frame: bytes) -> None:
    """Return when decoding this frame waits for nobody: its schema is known, or nobody has it.

    Takes as long as the log or the registry that may know it is away; whoever reads other records goes on meanwhile.
    """
    number, said = framed_id(frame), False
    while number is not None and not schemas.settled(number):
        try:
            await asyncio.to_thread(schemas.resolve, number)
        except UnknownSchema:
            return
        except SchemaAway as away:
            if not said:
                logger.warning("schema %d cannot be looked up now, its record waits: %s", number, away)
            said = True
            await asyncio.sleep(RETRY)
