"""Which partition a key belongs to: murmur2 as the Java client computes it, in pure Python.

Co-location must hold for every producer of a topic, whatever its language, so the hash is pinned: the Kafka client is
told `murmur2_random`, and `MemoryLog` uses this one.
"""

_SEED = 0x9747B28C
_MIX = 0x5BD1E995
_WORD = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """32-bit murmur2 of `data`, unsigned."""
    length = len(data)
    state = _SEED ^ length
    whole = length - length % 4
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * _MIX & _WORD
        word = (word ^ word >> 24) * _MIX & _WORD
        state = state * _MIX & _WORD ^ word
    if rest := data[whole:]:
        state = (state ^ int.from_bytes(rest, "little")) * _MIX & _WORD
    state = (state ^ state >> 13) * _MIX & _WORD
    return state ^ state >> 15


def partition_for(key: bytes, partitions: int) -> int:
    """The partition number of `key` among `partitions`, as Kafka's default partitioner chooses it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
