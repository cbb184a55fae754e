"""The root of rollstream's error tree; each floor adds its own below it.

RollstreamError
+-- WireError                        schemas/errors.py: a value that must not be written, or bytes that must not be read
|   +-- InvalidRecord                a value breaks a rule of its record (lengths, ranges, NaN)
|   +-- MalformedBytes               framing or body cannot be decoded
|   +-- UnknownSchema                the schema id cannot be resolved
+-- SchemaAway                       schemas/errors.py: whoever knows the schema does not answer now
+-- ConfigError                      infra/config.py: names file and key
+-- LogError                         infra/log.py (retriable or not)
|   +-- RecordTooLarge, OffsetExpired, UnknownTopic
+-- RegistryError                    infra/registry.py: the Schema Registry refuses
+-- StoreError                       infra/store.py (retriable or not)
|   +-- NotFound, Lost (a conditional write that another won)
+-- CheckpointError                  infra/checkpoints.py
|   +-- DigestMismatch, Fenced
+-- WeightsError                     infra/weights.py: weights that do not fit the model
+-- StackError                       infra/stack/: the local stack
|   +-- AlreadyUp
+-- EngineError                      producers/engine.py
|   +-- PromptTooLong, EngineLost (for good: whoever uses it must end)
+-- RenderingError                   producers/rendering.py: a chat template that cannot be appended to
+-- UnusableEnvironment              producers/environments/: an unknown game or option
+-- MissingExtra                     a package of an extra is not installed; names the command that installs it
"""


class RollstreamError(Exception):
    """Every error that rollstream raises on purpose."""


class MissingExtra(RollstreamError):
    """A feature needs an extra that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra {extra!r}: pip install 'rollstream[{extra}]'")
        self.extra = extra


class SchemaAway(RollstreamError):
    """Whoever knows the schema (log, registry) does not answer now. That says nothing about the record: try again."""


class WireError(RollstreamError):
    """A record that must not be written, or bytes that must not be read. `reason` is the short name that is counted."""

    reason = "wire"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class InvalidRecord(WireError):
    """A value breaks a rule of its record."""

    reason = "invalid"


class MalformedBytes(WireError):
    """The framing or the body cannot be decoded."""

    reason = "malformed"


class UnknownSchema(WireError):
    """The schema id in the framing cannot be resolved."""

    reason = "unknown-schema"
