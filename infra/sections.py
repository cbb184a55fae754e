"""The sections of the configuration: every setting with its type, bounds, default and meaning.

docs/configuration.md is generated from here (reference.py), so what a description says is what a user reads.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", max_length=100)]
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$", max_length=100)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]


_SECRET = re.compile(
    r"secret|password|passphrase|token(?!s)|credential|jaas|api_?key|key\.pem|oauthbearer\.config", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a setting of this name must never be shown."""
    return _SECRET.search(name) is not None


def _spell_setting(value: object) -> object:
    """Client settings are text; TOML's numbers and booleans are spelled as the client reads them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _check_span(span: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= span[0] <= span[1]:
        raise ValueError(f"expected [first, last] with 0 <= first <= last, found {list(span)}")
    return span


def _check_bare(url: str | None) -> str | None:
    if url is not None and "@" in url:
        raise ValueError("expected a URL without credentials, which belong into user, password or token")
    return url


ClientSetting = Annotated[str, BeforeValidator(_spell_setting)]
Span = Annotated[tuple[int, int], AfterValidator(_check_span)]


class Section(BaseModel):
    """Base of all sections: frozen, an unknown key is an error, the line under a field describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class RunSection(Section):
    """Which run this is."""

    name: Name = "default"
    """Name of the run; keys its topics' records and its folder in the store."""
    namespace: Name = "rollstream"
    """Prefix of every topic."""
    seed: int = 0
    """Seed from which, with their process ids, those of the workers are derived."""


class KafkaSection(Section):
    """How the log is reached."""

    bootstrap: str = "127.0.0.1:9092"
    """Bootstrap servers, `host:port`, comma-separated."""
    group_protocol: Literal["classic", "consumer"] = "classic"
    """`consumer` (KIP-848) on Apache Kafka 4, `classic` elsewhere."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "zstd"
    """Of produced batches."""
    buffer_bytes: Count = 64 << 20
    """Bytes that a producer holds for the broker; a full buffer makes the caller wait."""
    max_record_bytes: Count = 1_048_576
    """Largest record, in bytes, that is sent."""
    settings: Annotated[Mapping[str, ClientSetting], Field(repr=False)] = {}
    """Any more librdkafka settings, among them security: `"security.protocol" = "SASL_SSL"`, `"sasl.mechanism" =
    "SCRAM-SHA-512"`, `"ssl.ca.location" = "ca.pem"`."""


class StoreSection(Section):
    """Where checkpoints lie: a bucket of any S3-compatible store that honours conditional writes."""

    url: str | None = None
    """Endpoint, `https://host:port`; absent: AWS."""
    bucket: Annotated[str, Field(min_length=1)] = "rollstream"
    """Bucket; it has to exist."""
    region: str = "us-east-1"
    """Region of the bucket."""
    access_key: str | None = None
    """Absent: the usual AWS chain (environment, profile, instance) finds the keys."""
    secret_key: SecretStr | None = None
    """Belongs to `access_key`; never shown."""
    prefix: str = ""
    """Put before every key, e.g. `team-a/`."""


class RegistrySection(Section):
    """A Schema Registry with Confluent's API, whose ids then stand in the framing. Without a URL ids are made of the
    schemas themselves."""

    url: Annotated[str | None, AfterValidator(_check_bare)] = None
    """Where its API begins, e.g. `https://registry:8081`; more than one, comma-separated, for the same registry."""
    user: str | None = None
    """Of basic authentication; absent: none."""
    password: SecretStr | None = None
    """Belongs to `user`; never shown."""
    token: SecretStr | None = None
    """Of bearer authentication; never shown."""
    settings: Annotated[Mapping[str, ClientSetting], Field(repr=False)] = {}
    """Any more settings of Confluent's client: `"ssl.ca.location" = "ca.pem"`, `"bearer.auth.logical.cluster" =
    "lsrc-1"`."""
    timeout: Positive = 5.0
    """Seconds for one answer."""
    patience: NotNegative = 60.0
    """Seconds that a start waits for a registry that is away."""
    auto_register: bool = False
    """Register this release's schemas at the start of a role, too, not only at `rollstream topics apply`."""


class TimeoutSection(Section):
    """Seconds that one call of a stage may take; waiting for a free place is not charged."""

    init: Positive = 60.0
    """Making and resetting an environment."""
    step: Positive = 60.0
    """One step of an environment."""
    generate: Positive = 300.0
    """One completion of the engine."""
    close: Positive = 10.0
    """Closing an environment."""


class PoolSection(Section):
    """How many calls of a stage run at once in a worker; 0 for as many as there are episodes."""

    init: Whole = 0
    """Resets of environments."""
    step: Whole = 0
    """Steps of environments."""
    generate: Whole = 0
    """Completions of the engine."""


class EnvironmentSection(Section):
    """One environment, `[environments.NAME]`; NAME (a-z, 0-9, -) names its topic."""

    adapter: str
    """`textarena`, `reasoning-gym`, `gymnasium`, or `package.module:function` of your own."""
    game: str | None = None
    """What the adapter opens: a game, a dataset or an id of its package; absent: NAME."""
    options: Mapping[str, Any] = {}
    """Options of the adapter and of the game."""
    ratio: Positive = 1.0
    """Share of the groups among all environments, on any scale."""
    group_size: Count = 8
    """Samples of one task that are compared with each other."""
    max_turns: Whole = 0
    """Sampled turns of an episode; 0 leaves it to the environment."""
    partitions: Count = 4
    """Partitions of its topic."""
    seeds: Span = (0, (1 << 31) - 1)
    """First and last seed of its tasks, both included."""
    timeouts: TimeoutSection | None = None
    """Where they differ from `[worker.timeouts]`."""


class SamplingSection(Section):
    """How tokens are sampled."""

    temperature: NotNegative = 1.0
    """0 is greedy."""
    max_tokens: Count = 256
    """Sampled tokens of one turn, at most."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 is off."""
    top_k: Whole = 0
    """Only the k likeliest tokens; 0 is off."""


class WorkerSection(Section):
    """A rollout worker and its engine."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates tokens."""
    model: Path | None = None
    """Hugging Face directory: tokenizer, shape, first weights. Absent: those of the checkpoint."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights that are served."""
    context: Count | None = None
    """Tokens of one request, prompt included; absent: the model's."""
    concurrency: Count = 64
    """Episodes at once."""
    max_lag: Whole | None = None
    """Begin no episode while the engine is more versions behind the newest policy; absent: always."""
    spill: Path = Path(".rollstream/spill")
    """Folder for finished episodes that the log does not take just now; the workers of a machine share it, and what a
    dead one left there the next one delivers."""
    spill_bytes: Whole = 1 << 30
    """Bytes that one worker keeps there; when they are used up its episodes wait. 0 keeps nothing on the disk."""
    timeouts: TimeoutSection = TimeoutSection()
    """Seconds of each stage."""
    pools: PoolSection = PoolSection()
    """Places of each stage."""


class TrainerSection(Section):
    """What a step trains on, how, and where it is kept."""

    model: Path | None = None
    """Hugging Face directory that a new run starts from."""
    objective: Literal["grpo", "clone"] = "grpo"
    """Reinforce, or imitate the log (a warm start)."""
    advantage: Literal["grpo", "dr-grpo", "rloo"] = "grpo"
    """Baseline and scale of a reward."""
    aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    """Every token of a step weighs the same, or every sequence."""
    groups_per_step: Count = 32
    """Groups that one optimizer step takes."""
    max_staleness: Whole = 2
    """Policy versions that a trained sample may be behind; strict."""
    group_timeout: Positive = 120.0
    """Seconds that a group waits for its missing samples."""
    steps: Count | None = None
    """Stop after so many steps of the run; absent: go on."""
    checkpoint_every: Count = 1
    """Optimizer state goes into every n-th checkpoint, and into the last one before a stop; weights into each."""
    patience: Positive = 600.0
    """Seconds for which a publish is tried again while the store or the log is away; then the trainer ends."""
    keep: Whole = 20
    """Newest checkpoints whose objects stay; older ones keep their manifest only. 0 keeps all."""
    lr: Positive = 1e-6
    """Learning rate of AdamW."""
    warmup: Whole = 0
    """Optimizer updates over which the rate rises from 0."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    weight_decay: NotNegative = 0.0
    """Of matrices and embeddings."""
    grad_clip: Positive = 1.0
    """Largest norm of a gradient."""
    clip_low: Share = 0.2
    """The policy ratio is clipped below at 1 - this."""
    clip_high: NotNegative = 0.28
    """The policy ratio is clipped above at 1 + this."""
    importance_cap: Positive = 2.0
    """The weight against the behaviour policy is truncated here."""
    entropy: NotNegative = 0.0
    """Coefficient of the entropy bonus."""
    kl: NotNegative = 0.0
    """Coefficient of the penalty for leaving the reference model."""
    minibatches: Count = 1
    """Optimizer updates in one pass over a step's samples."""
    epochs: Count = 1
    """Passes over a step's samples."""
    min_informative: Share = 0.1
    """A step is skipped where fewer of its samples have an advantage."""
    micro_batch_tokens: Count = 8192
    """Padded tokens of one forward and backward pass."""
    bf16: bool = False
    """Multiply matrices in bfloat16; weights and losses stay float32."""
    seed: int = 0
    """Of the shuffle into minibatches."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1`."""
    buffer_bytes: Count = 64 << 20
    """Bytes of records that wait between log and trainer."""


class DispatchSection(Section):
    """The dispatcher. How many groups are in flight follows from the trainer's staleness bound."""

    groups: Count | None = None
    """Stop after so many groups; absent: go on."""


def is_table(annotation: object) -> bool:
    """Whether an annotation is a table whose keys are the user's."""
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def find_section(annotation: object) -> type[BaseModel] | None:
    """The section in an annotation: itself, one that may be absent, or those of a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (find_section(argument) for argument in cast(tuple[object, ...], get_args(annotation)))
    return next((section for section in inner if section is not None), None)
