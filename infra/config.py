"""Configuration: a TOML file, environment variables, overrides of the command line; the later ones are stronger.

    FILE < ROLLSTREAM_SECTION__KEY=value < --set section.key=value          --> Config, frozen and checked

The file is the one given, else $ROLLSTREAM_CONFIG, else ./rollstream.toml. Where nothing of this says where broker and
store are, ./.rollstream/rollstream.toml lies below it: the local stack, as `rollstream up` left it.
A mistake is an error that names where it stands, its key, and what was expected there.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from .drafts import ConfigError, Draft
from .faults import describe_faults
from .sections import (
    DispatchSection,
    EnvironmentName,
    EnvironmentSection,
    KafkaSection,
    RegistrySection,
    RunSection,
    SamplingSection,
    Section,
    StoreSection,
    TimeoutSection,
    TrainerSection,
    WorkerSection,
)
from .spelling import render_settings

__all__ = [
    "Config",
    "ConfigError",
    "DispatchSection",
    "EnvironmentSection",
    "KafkaSection",
    "RegistrySection",
    "RunSection",
    "SamplingSection",
    "StoreSection",
    "TimeoutSection",
    "TrainerSection",
    "WorkerSection",
]

FILE = Path("rollstream.toml")
LOCAL_STACK = Path(".rollstream") / FILE
VARIABLE = "ROLLSTREAM_CONFIG"
PLACES = (("kafka", "bootstrap"), ("store", "url"), ("store", "bucket"))
"""Who sets one of these has servers of his own: nothing of the local stack may mix with them."""


class Config(Section):
    """Everything that can be set."""

    run: RunSection = RunSection()
    kafka: KafkaSection = KafkaSection()
    store: StoreSection = StoreSection()
    registry: RegistrySection = RegistrySection()
    environments: Mapping[EnvironmentName, EnvironmentSection] = {}
    sampling: SamplingSection = SamplingSection()
    worker: WorkerSection = WorkerSection()
    trainer: TrainerSection = TrainerSection()
    dispatch: DispatchSection = DispatchSection()

    @classmethod
    def load(
        cls, path: Path | None = None, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
    ) -> Self:
        """Read and check all layers; `environ` is this process's unless given. Raises `ConfigError`."""
        environ = os.environ if environ is None else environ
        overrides = tuple(overrides)
        files = _find_files(path, environ)
        draft = cls._read(files, overrides, environ)
        if LOCAL_STACK.exists() and not any(draft.has(place) for place in PLACES):
            draft = cls._read((LOCAL_STACK, *files), overrides, environ)
        return cls._checked(draft)

    def show(self) -> str:
        """All settings as TOML, defaults too, secrets hidden."""
        return render_settings(self.model_dump(mode="json"))

    @classmethod
    def _read(cls, files: Iterable[Path], overrides: Iterable[str], environ: Mapping[str, str]) -> Draft:
        draft = Draft()
        for file in files:
            draft.read_file(file)
        draft.read_environment(environ, sections=cls.model_fields)
        for override in overrides:
            draft.read_override(override)
        return draft

    @classmethod
    def _checked(cls, draft: Draft) -> Self:
        try:
            return cls.model_validate_json(draft.to_json())
        except ValidationError as error:
            # `--set run.name=7` was read as a number where text is wanted.
            textual = [fault["loc"] for fault in error.errors() if fault["type"] in ("string_type", "path_type")]
            if draft.take_literally(tuple(map(str, key)) for key in textual):
                return cls._checked(draft)
            raise describe_faults(cls, draft, error) from None


def _find_files(path: Path | None, environ: Mapping[str, str]) -> tuple[Path, ...]:
    if path is not None:
        return (path,)
    if named := environ.get(VARIABLE):
        return (Path(named),)
    return (FILE,) if FILE.exists() else ()
