"""The wire: record types, codec, schemas, headers. Knows nothing else of rollstream and imports nothing heavy.

encode(record) -> bytes               decode(data) -> record           framed Avro, validated in both directions
trajectory_headers(trajectory)        parse_headers(headers)           what a reader judges before it decodes
Schemas(lookup, ids)                  record_schemas()                 which schema stands behind an id
full_problems(first, second)                                           whether two schemas may live on one log
"""

from .codec import MAX_BYTES, decode, decode_as, encode, framed_id
from .compatibility import Problem, full_problems, reader_problems
from .errors import (
    InvalidRecord,
    MalformedBytes,
    MissingExtra,
    RollstreamError,
    SchemaAway,
    UnknownSchema,
    WireError,
)
from .headers import TrajectoryHeaders, parse_headers, trajectory_headers
from .records import (
    Claim,
    Command,
    Consumed,
    Control,
    Floats,
    Mask,
    Offsets,
    PolicySpan,
    PolicyUpdate,
    Receipt,
    Role,
    Sampling,
    Status,
    Task,
    Tokens,
    Trajectory,
    Turn,
    WireRecord,
    trajectory_id,
)
from .registry import Lookup, Schemas, Shipped, record_schemas, schema_id
from .validate import validate

__all__ = [
    "MAX_BYTES",
    "Claim",
    "Command",
    "Consumed",
    "Control",
    "Floats",
    "InvalidRecord",
    "Lookup",
    "MalformedBytes",
    "Mask",
    "MissingExtra",
    "Offsets",
    "PolicySpan",
    "PolicyUpdate",
    "Problem",
    "Receipt",
    "Role",
    "RollstreamError",
    "Sampling",
    "SchemaAway",
    "Schemas",
    "Shipped",
    "Status",
    "Task",
    "Tokens",
    "Trajectory",
    "TrajectoryHeaders",
    "Turn",
    "UnknownSchema",
    "WireError",
    "WireRecord",
    "decode",
    "decode_as",
    "encode",
    "framed_id",
    "full_problems",
    "parse_headers",
    "reader_problems",
    "record_schemas",
    "schema_id",
    "trajectory_headers",
    "trajectory_id",
    "validate",
]
