"""Configuration: which layer wins, and what a mistake is told like."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollstream.infra.config import Config, ConfigError
from rollstream.infra.reference import render_reference
from rollstream.infra.stack import Endpoints

EXAMPLE = """\
[run]
name = "first"

[kafka]
bootstrap = "broker:9092"

[kafka.settings]
"security.protocol" = "SASL_SSL"
"session.timeout.ms" = 6000
"enable.ssl.certificate.verification" = true
sasl.password = "hunter2"

[store]
url = "https://s3.example"
access_key = "AKIA"
secret_key = "hunter3"

[environments.frozen-lake]
adapter = "gymnasium"
game = "FrozenLake-v1"
ratio = 2
seeds = [10, 20]
options = { size = 4, map = ["SF", "FG"] }

[trainer]
lr = 1e-4
betas = [0.8, 0.9]
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of the working directory may leak in."""
    monkeypatch.chdir(tmp_path)


def write_example(name: str = "some.toml", text: str = EXAMPLE) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def load(*overrides: str, path: Path | None = None, **environ: str) -> Config:
    return Config.load(path, overrides, environ)


def mistake(*overrides: str, path: Path | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(path, overrides, environ)
    return str(caught.value)


# ---------------------------------------------------------------------- layers


def test_file_is_read_and_the_rest_are_defaults() -> None:
    config = load(path=write_example())
    lake = config.environments["frozen-lake"]
    assert (config.run.name, config.run.namespace) == ("first", "rollstream")
    assert (lake.game, lake.ratio, lake.seeds) == ("FrozenLake-v1", 2.0, (10, 20))
    assert lake.options == {"size": 4, "map": ["SF", "FG"]}
    assert (config.trainer.lr, config.trainer.betas, config.trainer.grad_clip) == (1e-4, (0.8, 0.9), 1.0)


def test_client_settings_are_text_however_they_are_written() -> None:
    assert load(path=write_example()).kafka.settings == {
        "security.protocol": "SASL_SSL",
        "session.timeout.ms": "6000",
        "enable.ssl.certificate.verification": "true",
        "sasl.password": "hunter2",
    }


def test_environment_wins_over_file_and_override_over_both() -> None:
    path = write_example()
    assert load(path=path, ROLLSTREAM_TRAINER__LR="2e-4").trainer.lr == 2e-4
    assert load("trainer.lr=3e-4", path=path, ROLLSTREAM_TRAINER__LR="2e-4").trainer.lr == 3e-4
    assert load("trainer.betas=[0.1, 0.2]", path=path).trainer.betas == (0.1, 0.2)


def test_variables_reach_names_with_dashes_and_dots() -> None:
    config = load(
        path=write_example(),
        ROLLSTREAM_ENVIRONMENTS__FROZEN_LAKE__RATIO="3",
        ROLLSTREAM_KAFKA__SETTINGS__SASL_MECHANISM="PLAIN",
    )
    assert config.environments["frozen-lake"].ratio == 3
    assert config.kafka.settings["sasl.mechanism"] == "PLAIN"


@pytest.mark.parametrize("text", ["7", "1.10", "true", "[1]", "0x10", "a b"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    config = load(f"store.secret_key={text}", f"kafka.settings.sasl.password={text}", f"store.region={text}")
    assert config.store.secret_key is not None
    assert config.store.secret_key.get_secret_value() == text
    assert config.kafka.settings["sasl.password"] == text
    assert config.store.region == text


def test_search_takes_the_first_file_there_is() -> None:
    local = write_example(".rollstream/rollstream.toml", '[run]\nname = "local"\n')
    assert load().run.name == "local"
    write_example("rollstream.toml", '[run]\nname = "here"\n')
    assert load().run.name == "here"
    write_example("named.toml", '[run]\nname = "named"\n')
    assert load(ROLLSTREAM_CONFIG="named.toml").run.name == "named"
    assert load(path=local, ROLLSTREAM_CONFIG="named.toml").run.name == "local"


def test_local_stack_lies_below_a_file_without_places_and_never_mixes_with_others() -> None:
    ends = Endpoints(
        bootstrap="127.0.0.1:1",
        broker="kafka",
        s3_url="http://127.0.0.1:2",
        access_key="local",
        secret_key='quoted " \\ key',
        bucket="runs",
        group_protocol="consumer",
    )
    write_example(".rollstream/rollstream.toml", ends.to_toml())
    write_example("rollstream.toml", "[kafka]\nbuffer_bytes = 5\n[trainer]\nlr = 0.5\n")
    config = load()
    assert (config.kafka.bootstrap, config.kafka.group_protocol) == ("127.0.0.1:1", "consumer")
    assert (config.kafka.buffer_bytes, config.trainer.lr, config.store.url) == (5, 0.5, "http://127.0.0.1:2")
    assert config.store.secret_key is not None
    assert config.store.secret_key.get_secret_value() == ends.secret_key
    production = load("kafka.bootstrap=prod:9092")
    assert (production.store.url, production.store.access_key) == (None, None)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[trainer]\nlrr = 1\n", "trainer.lrr: unknown key; did you mean trainer.lr?"),
        ("[run]\nlr = 1\n", "run.lr: unknown key; did you mean trainer.lr?"),
        ("[trainner]\nlr = 1\n", "trainner: unknown key; did you mean trainer?"),
        ('[trainer]\nlr = "fast"\n', "trainer.lr: expected a valid number, found 'fast'"),
        ('[trainer]\nsteps = "5"\n', "trainer.steps: expected a valid integer, found '5'"),
        ("[trainer]\nsteps = 1.5\n", "trainer.steps: expected a valid integer"),
        ("[trainer]\nlr = nan\n", "trainer.lr: expected a finite number"),
        ("[trainer]\nlr = -1\n", "trainer.lr: expected greater than 0, found -1"),
        ("[trainer]\nbf16 = 1\n", "trainer.bf16: expected a valid boolean, found 1"),
        ("[trainer]\nbetas = [0.9]\n", "trainer.betas.1: expected a value, found none"),
        ("trainer = 3\n", "trainer: expected"),
        (
            '[kafka]\ngroup_protocol = "share"\n',
            "kafka.group_protocol: expected 'classic' or 'consumer', found 'share'",
        ),
        ('[environments.Lake]\nadapter = "x"\n', "environments.Lake: expected match pattern"),
        ("[environments.a]\nratio = 1\n", "environments.a.adapter: expected a value, found none"),
        ('[environments.a]\nadapter = "x"\ngroup_sise = 1\n', "did you mean environments.a.group_size?"),
        ('[environments.a]\nadapter = "x"\nseeds = [5, 1]\n', "expected [first, last] with 0 <= first <= last"),
        ('[environments.a]\nadapter = "x"\n[environments.a.timeouts]\nstpe = 1\n', "environments.a.timeouts.step?"),
        ("[worker.timeouts]\ninit = 0\n", "worker.timeouts.init: expected greater than 0"),
        ("[run\n", "expected TOML"),
    ],
)
def test_mistake_names_file_key_and_what_was_expected(text: str, told: str) -> None:
    message = mistake(path=write_example(text=text))
    assert message.startswith("some.toml: ")
    assert told in message


def test_each_mistake_names_its_own_place() -> None:
    message = mistake(
        "trainer.lr=x",
        path=write_example(text="[run]\nsed = 1\n"),
        ROLLSTREAM_TRAINER__STEPS="many",
    )
    assert sorted(message.splitlines()) == [
        "--set: trainer.lr: expected a valid number, found 'x'",
        "environment variable ROLLSTREAM_TRAINER__STEPS: trainer.steps: expected a valid integer, found 'many'",
        "some.toml: run.sed: unknown key; did you mean run.seed?",
    ]


@pytest.mark.parametrize("override", ["trainer.lr", "lr=1", "=1", "trainer.=1"])
def test_override_has_a_section_a_key_and_a_value(override: str) -> None:
    assert "expected section.key=value" in mistake(override)


def test_override_below_a_value_is_refused() -> None:
    assert "trainer.betas is a value already" in mistake("trainer.betas.x=1", path=write_example())


def test_override_of_a_whole_section_is_named_for_what_is_in_it() -> None:
    message = mistake('environments.frozen-lake={adapter = "x", ratio = "y"}', path=write_example())
    assert message == "--set: environments.frozen-lake.ratio: expected a valid number, found 'y'"


def test_variable_with_one_underscore_is_recognised() -> None:
    assert "expected two _ after the section: ROLLSTREAM_RUN__NAME" in mistake(ROLLSTREAM_RUN_NAME="x")


def test_file_that_was_named_has_to_be_there() -> None:
    assert "missing.toml: expected a configuration file" in mistake(path=Path("missing.toml"))
    assert "missing.toml: expected a configuration file" in mistake(ROLLSTREAM_CONFIG="missing.toml")


# ---------------------------------------------------------------------- secrets, docs, weight


def test_secrets_are_shown_nowhere() -> None:
    config = load(path=write_example())
    for told in (repr(config), str(config), config.show()):
        assert "hunter" not in told
    assert '"sasl.password" = "***"' in config.show()
    wrong = write_example(text='[store]\nsecret_key = 4242\n[kafka.settings]\n"sasl.password" = ["hunter2"]\n')
    message = mistake(path=wrong)
    assert "store.secret_key" in message
    assert "kafka.settings.sasl.password" in message
    assert "4242" not in message
    assert "hunter2" not in message


def test_what_is_shown_can_be_loaded_again() -> None:
    config = load("environments.frozen-lake.timeouts.step=5", path=write_example())
    again = load(path=write_example("shown.toml", config.show()))
    assert again.environments == config.environments
    assert (again.trainer, again.worker, again.sampling) == (config.trainer, config.worker, config.sampling)


def test_config_is_frozen() -> None:
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.run.name = "other"


def test_page_is_up_to_date_and_every_setting_has_a_meaning() -> None:
    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    expected = render_reference(Config)
    assert page.read_text() == expected, "run: python -m rollstream.infra.reference > docs/configuration.md"
    assert "|  |\n" not in expected


def test_loading_imports_nothing_heavy() -> None:
    heavy = "'torch', 'confluent_kafka', 'boto3', 'transformers'"
    code = f"import sys, rollstream.infra.config; print([m for m in ({heavy}) if m in sys.modules])"
    assert (
        subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
