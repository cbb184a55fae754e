"""Topics as data: names, what is declared, plans and what they do; the schemas topic. On every log."""

import uuid
from dataclasses import replace

import pytest

from rollstream.infra.kafka import KafkaLog
from rollstream.infra.log import Log, LogError, Topic
from rollstream.infra.memory import MemoryLog
from rollstream.infra.schemabook import LogSchemas, publish_schemas
from rollstream.infra.topics import Action, Change, Difference, Names, apply, declared, plan, verify
from rollstream.schemas import Schemas, UnknownSchema, record_schemas


@pytest.fixture(params=("memory", "tansu", "kafka"))
def log(request: pytest.FixtureRequest) -> Log:
    if request.param == "memory":
        return MemoryLog()
    return KafkaLog(request.getfixturevalue(f"{request.param}_address"))


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4()}"


class TestNames:
    def test_names(self) -> None:
        names = Names()
        assert names.tasks == "rollstream.tasks"
        assert names.control == "rollstream.control"
        assert names.policy == "rollstream.policy"
        assert names.ledger == "rollstream.ledger"
        assert names.dead_letter == "rollstream.dead-letter"
        assert names.schemas == "rollstream.schemas"
        assert Names("team-a.x").trajectories("frozen-lake2") == "team-a.x.trajectories.frozen-lake2"

    @pytest.mark.parametrize("environment", ["", "Frozen", "a.b", "a_b", "a b", "ä", "a\n"])
    def test_an_environment_is_of_small_letters_digits_and_dashes(self, environment: str) -> None:
        with pytest.raises(LogError, match="environment"):
            Names().trajectories(environment)

    @pytest.mark.parametrize("namespace", ["", "A", ".a", "a.", "a..b", "a/b", "a\n"])
    def test_a_namespace_too(self, namespace: str) -> None:
        with pytest.raises(LogError, match="namespace"):
            Names(namespace)


class TestDeclared:
    def test_every_topic_of_the_design_is_there_once(self) -> None:
        topics = declared("ns", ["one", "two"], partitions=3)
        assert {topic.name: topic.partitions for topic in topics} == {
            "ns.tasks": 3,
            "ns.trajectories.one": 3,
            "ns.trajectories.two": 3,
            "ns.control": 1,
            "ns.policy": 1,
            "ns.ledger": 1,
            "ns.dead-letter": 1,
            "ns.schemas": 1,
        }
        assert len(topics) == 8

    def test_an_environment_may_have_its_own_number_of_partitions(self) -> None:
        found = {topic.name: topic.partitions for topic in declared("ns", {"one": 5, "two": 1}, partitions=3)}
        assert (found["ns.trajectories.one"], found["ns.trajectories.two"], found["ns.tasks"]) == (5, 1, 3)

    def test_what_must_stay_stays_and_what_flows_is_bounded(self) -> None:
        config = {topic.name: topic.config for topic in declared("ns", ["e"], retention_days=2)}
        assert config["ns.policy"]["cleanup.policy"] == config["ns.schemas"]["cleanup.policy"] == "compact"
        assert config["ns.ledger"]["retention.ms"] == "-1"
        assert config["ns.trajectories.e"]["retention.ms"] == config["ns.tasks"]["retention.ms"] == "172800000"
        assert config["ns.trajectories.e"]["max.message.bytes"] == "1000000"

    @pytest.mark.parametrize("limit", [10_000, 1_000_000, 4_000_000])
    def test_a_dead_letter_has_room_for_any_record_and_its_headers(self, limit: int) -> None:
        config = {topic.name: int(topic.config["max.message.bytes"]) for topic in declared("ns", [], max_bytes=limit)}
        assert config.pop("ns.dead-letter") >= max(config.values()) + 40_000


class TestPlan:
    def test_from_nothing_to_declared_and_then_nothing_to_do(self, log: Log, namespace: str) -> None:
        topics = declared(namespace, ["e"], partitions=2)
        changes = plan(log, topics)
        assert [change.action for change in changes] == [Action.CREATE] * 7
        assert not any(name.startswith(namespace) for name in log.topics())
        assert len(verify(log, topics)) == 7

        apply(log, changes)
        assert {name: count for name, count in log.topics().items() if name.startswith(namespace)} == {
            topic.name: topic.partitions for topic in topics
        }
        assert plan(log, topics) == ()
        assert verify(log, topics) == ()
        apply(log, changes)

    def test_a_setting_that_differs_is_altered_and_the_rest_is_kept(self, log: Log, namespace: str) -> None:
        (topic, *_) = topics = declared(namespace, [])
        apply(log, plan(log, topics))
        log.alter(topic.name, {"retention.ms": "1000"})
        wanted = topic.config["retention.ms"]
        (change,) = plan(log, topics)
        assert change == Change(
            action=Action.ALTER,
            topic=topic,
            differences=(Difference(topic.name, "retention.ms", wanted, "1000"),),
        )
        assert verify(log, topics) == change.differences
        apply(log, [change])
        assert verify(log, topics) == ()

    def test_growing_and_shrinking(self, log: Log, namespace: str, request: pytest.FixtureRequest) -> None:
        (topic, *_) = topics = declared(namespace, [], partitions=2)
        apply(log, plan(log, topics))
        fewer, more = replace(topic, partitions=1), replace(topic, partitions=3)
        assert verify(log, [fewer]) == ()
        assert verify(log, [more]) == (Difference(topic.name, "partitions", "3", "2"),)

        refused = plan(log, [fewer])
        assert [change.action for change in refused] == [Action.REFUSE]
        new = Topic(name=f"{namespace}.new")
        with pytest.raises(LogError, match=r"nothing was applied: refuse .* partitions: 2 -> 1"):
            apply(log, [*plan(log, [new]), *refused])
        assert new.name not in log.topics()

        changes = plan(log, [more])
        assert [change.action for change in changes] == [Action.GROW]
        if "tansu" in request.node.name:
            with pytest.raises(LogError, match="cannot add partitions"):
                apply(log, changes)
            pytest.skip("Tansu 0.6 cannot add partitions; it says so")
        apply(log, changes)
        assert log.topics()[topic.name] == 3

    def test_changes_read_as_a_plan(self) -> None:
        topic = Topic(name="ns.tasks", partitions=2, config={"b": "2", "a": "1"})
        lines = [
            Change(action=Action.CREATE, topic=topic),
            Change(action=Action.GROW, topic=topic, differences=(Difference("ns.tasks", "partitions", "2", "1"),)),
            Change(action=Action.ALTER, topic=topic, differences=(Difference("ns.tasks", "a", "1", "not set"),)),
        ]
        assert [str(line) for line in lines] == [
            "create   ns.tasks  partitions=2 a=1 b=2",
            "grow     ns.tasks  partitions: 1 -> 2",
            "alter    ns.tasks  a: not set -> 1",
        ]
        assert str(Difference("t", "topic", "2 partitions", "none")) == "t: topic: expected 2 partitions, found none"


class TestSchemas:
    def test_schemas_are_published_once_and_found(self, log: Log, namespace: str) -> None:
        names = Names(namespace)
        apply(log, plan(log, declared(namespace, [])))
        book = LogSchemas(log, names)
        shipped = record_schemas()
        with pytest.raises(UnknownSchema, match=str(shipped[0].id)):
            book.fetch(shipped[0].id)
        assert publish_schemas(log, names) == tuple(schema.id for schema in shipped)
        assert publish_schemas(log, names) == ()
        assert [book.fetch(schema.id) for schema in shipped] == [schema.text for schema in shipped]
        assert LogSchemas(log, names).known() == {schema.id: schema.text for schema in shipped}

    def test_a_schema_of_another_release_is_resolved(self, log: Log, namespace: str) -> None:
        names = Names(namespace)
        apply(log, plan(log, declared(namespace, [])))
        schemas = Schemas(LogSchemas(log, names), retry_after=0)
        with pytest.raises(UnknownSchema):
            schemas.resolve(12345)
        text = record_schemas()[0].text
        with log.writer() as writer:
            writer.append(names.schemas, text.encode(), key=b"12345")
            writer.append(names.schemas, None, key=b"6")
            writer.append(names.schemas, b"\xff{", key=b"not a number")
        assert schemas.resolve(12345).kind.lower() == record_schemas()[0].name.partition(".")[0].replace("_", "")

    def test_two_schemas_never_share_an_id(self, log: Log, namespace: str) -> None:
        names = Names(namespace)
        apply(log, plan(log, declared(namespace, [])))
        with log.writer() as writer:
            writer.append(names.schemas, b"another", key=str(record_schemas()[0].id).encode())
        with pytest.raises(LogError, match="another schema"):
            publish_schemas(log, names)

    def test_without_the_topic_it_is_an_error_and_not_an_unknown_schema(self, log: Log, namespace: str) -> None:
        with pytest.raises(LogError, match="no topic"):
            LogSchemas(log, Names(namespace)).fetch(1)
