"""Acknowledgements that leave open whether a record was stored.

A broker that finds a batch's sequence number behind what it remembers of the producer answers "duplicate", and the
client takes that for success. But the batch need not be there: Tansu, killed in between, remembers the number and has
lost the batch. And nobody says where it lies: the client counts the offsets of such a batch from -1.
"""

from dataclasses import dataclass

from ..log import FRAMING

MOST = 10_000
"""Records in one batch at most, the client's `batch.num.messages`."""


@dataclass(slots=True)
class Doubt:
    """Follows the delivery reports of one partition, in their order."""

    batch_bytes: int
    """What a batch holds at most."""
    sent_before: int = 0
    """Records sent later than this cannot be in the batch in doubt."""
    next: int = 0
    """Offset by which a further record of that batch would be known."""
    room: int = 0
    """Bytes that are left in that batch; 0 where none is in doubt."""

    def raised(self, offset: int | None, size: int, *, sent: int, now: int) -> bool:
        """Is it open whether this record was stored? `sent` and `now` count sendings, this record's and so far.

        True for the first record of a batch acknowledged as a duplicate (offset -1, shown as None), and for those that
        follow with 0, 1, 2, ... as far as they may belong to it. A record whose true offset is one of these right then
        is doubted in vain, and stored twice; nothing in doubt is ever taken for stored.
        """
        content = max(size - FRAMING, 1)
        if offset is None:
            self.sent_before, self.next, self.room = now, 0, self.batch_bytes - content
            return True
        if offset != self.next or content > self.room or sent >= self.sent_before or self.next > MOST:
            self.room = 0
            return False
        self.next += 1
        self.room -= content
        return True
