"""One step: judged again, scored, learned, every record settled, and the same whatever the order."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers import Group, Learner, LearnerSettings, Objective, Seen, StalenessGate
from rollstream.consumers.gatherer import Gathered
from rollstream.consumers.groups import Drop, Member
from rollstream.consumers.ledger import Settlement
from rollstream.consumers.step import Step, make_step
from rollstream.infra.log import Partition, Position
from rollstream.infra.models import open_model
from rollstream.schemas import PolicySpan, Receipt, Trajectory, decode_as, encode

Episode = Callable[..., Trajectory]
P = Partition("maze", 0)
SETTINGS = LearnerSettings(lr=1e-2, min_informative=0.0)


@pytest.fixture
def learner(policy_dir: Path) -> Learner:
    return Learner(open_model(policy_dir), SETTINGS)


def group(*trajectories: Trajectory, start: int = 0, dropped: tuple[Drop, ...] = ()) -> Group:
    members = tuple(Member(Position(P, start + i), t) for i, t in enumerate(trajectories))
    return Group(group_id=trajectories[0].group_id, members=members, dropped=dropped)


def step(learner: Learner, *groups: Group, version: int = 1, bound: int | None = 2, seen: Seen | None = None) -> Step:
    gate = StalenessGate(bound, version)
    return make_step(
        Gathered(groups=groups, idle=0.0), learner, gate, Seen(max_staleness=bound) if seen is None else seen
    )


def settled(settlement: Settlement) -> dict[str, list[int]]:
    kinds = {"trained": settlement.trained, **settlement.dropped}
    return {kind: sorted(p.offset for p in positions) for kind, positions in kinds.items() if positions}


def weights(learner: Learner) -> bytes:
    return b"".join(v.numpy().tobytes() for v in learner.model.state_dict().values())


def test_a_sample_that_aged_while_it_waited_is_dropped_as_stale(learner: Learner, episode: Episode) -> None:
    old, fresh = group(episode("a", 0), episode("a", 1, version=2)), group(episode("b", 0), episode("b", 1), start=2)
    assert settled(step(learner, old, fresh, version=3).settlement) == {"trained": [0, 1, 2, 3]}
    done = step(learner, old, group(episode("b", 0, version=4), episode("b", 1, version=2), start=2), version=4)
    # What is left of group a is one sample alone: it has nobody to be compared with.
    assert settled(done.settlement) == {"stale": [0], "zero-variance": [1], "trained": [2, 3]}
    assert done.groups == ("a", "b")
    assert (done.metrics["staleness.0"], done.metrics["staleness.2"]) == (1.0, 1.0)


def test_the_oldest_trainable_token_counts(learner: Learner, episode: Episode) -> None:
    mixed = replace(episode("a", 0), spans=(PolicySpan(version=5, count=3), PolicySpan(version=1, count=1)))
    pair = group(mixed, episode("a", 1, version=5), episode("a", 2, version=5))
    assert settled(step(learner, pair, version=5).settlement) == {"stale": [0], "trained": [1, 2]}


def test_without_a_bound_any_version_trains_and_none_too(policy_dir: Path, episode: Episode) -> None:
    cloner = Learner(open_model(policy_dir), replace(SETTINGS, objective=Objective.CLONE))
    unknown = replace(episode("a", 1), spans=(), logprobs=np.empty(0, np.float32))
    done = step(cloner, group(episode("a", 0), unknown), version=99, bound=None)
    assert settled(done.settlement) == {"trained": [0, 1]}
    assert "staleness.98" in done.metrics


def test_a_group_without_variance_is_dropped_by_name_and_the_rest_trains(learner: Learner, episode: Episode) -> None:
    equal = group(episode("a", 0, reward=0.1), episode("a", 1, reward=0.1))
    alone = group(episode("b", 0, size=1), start=2)
    done = step(learner, equal, alone, group(episode("c", 0), episode("c", 1), start=3))
    assert settled(done.settlement) == {"zero-variance": [0, 1, 2], "trained": [3, 4]}
    assert (done.metrics["samples"], done.metrics["trajectories"]) == (2.0, 5.0)


def test_a_step_with_nothing_to_train_settles_and_changes_nothing(learner: Learner, episode: Episode) -> None:
    before = weights(learner)
    lone = Group(group_id="", members=(), dropped=(Drop(Position(P, 9), "tombstone"),))
    whole = Group(group_id="a", members=(), dropped=(Drop(Position(P, 1), "failed", "a/0/0"),))
    done = step(learner, lone, whole)
    assert settled(done.settlement) == {"failed": [1], "tombstone": [9]}
    assert (done.groups, done.result.skipped, done.result.loss) == (("a",), "empty", 0.0)
    assert weights(learner) == before
    assert settled(step(learner, lone).settlement) == {"tombstone": [9]}


def test_a_skipped_update_is_a_reason(policy_dir: Path, episode: Episode) -> None:
    choosy = Learner(open_model(policy_dir), replace(SETTINGS, min_informative=0.9))
    equal = group(episode("a", 0, reward=0.5), episode("a", 1, reward=0.5))
    done = step(choosy, equal, group(episode("b", 0), episode("b", 1), start=2))
    assert settled(done.settlement) == {"zero-variance": [0, 1], "skipped-uninformative": [2, 3]}


def test_rewards_at_the_edge_of_a_double_break_neither_weights_nor_receipt(learner: Learner, episode: Episode) -> None:
    before = weights(learner)
    extreme = group(episode("a", 0, reward=1.7e308), episode("a", 1, reward=1.7e308), episode("a", 2, reward=-1.7e308))
    done = step(learner, extreme)
    assert settled(done.settlement) == {"skipped-nonfinite": [0, 1, 2]}
    assert weights(learner) == before
    written = receipt(done)
    again = decode_as(Receipt, encode(written))
    assert math.isnan(again.loss)
    assert again.metrics.keys() == done.metrics.keys()


def receipt(done: Step) -> Receipt:
    return Receipt(
        run="r",
        incarnation="i",
        step=1,
        version=2,
        parent=1,
        consumed=done.settlement.consumed(),
        groups=done.groups,
        loss=done.result.loss,
        metrics=done.metrics,
    )


def test_the_order_of_the_groups_changes_no_bit(policy_dir: Path, episode: Episode) -> None:
    def train(order: int) -> tuple[bytes, bytes]:
        learner = Learner(open_model(policy_dir), replace(SETTINGS, minibatches=2))
        groups = [group(episode(f"g{i}", 0), episode(f"g{i}", 1), start=2 * i) for i in range(4)]
        done = step(learner, *groups[::order])
        return encode(receipt(done)), weights(learner)

    assert train(1) == train(-1)


def test_all_that_was_settled_is_known_afterwards(learner: Learner, episode: Episode) -> None:
    seen = Seen(max_staleness=2)
    dropped = (Drop(Position(P, 5), "malformed", "a/2/0"), Drop(Position(P, 6), "malformed"))
    step(learner, group(episode("a", 0), episode("a", 1), dropped=dropped), seen=seen)
    step(learner, Group(group_id="b", members=(), dropped=(Drop(Position(P, 7), "malformed"),)), seen=seen)
    assert all(map(seen.trajectory, ("a/0/0", "a/1/0", "a/2/0")))
    assert seen.group("a")
    assert seen.group("b")


def test_a_trainer_that_went_back_remembers_tokens_of_its_lost_future(learner: Learner, episode: Episode) -> None:
    """At policy 4 it trains tokens of policy 6; at policy 7 a copy is fresh, and must still be known."""
    seen = Seen(max_staleness=2)
    step(learner, group(episode("a", 0, version=6), episode("a", 1, version=6)), version=4, seen=seen)
    seen.evict(7)
    assert seen.trajectory("a/0/0")
    seen.evict(9)
    assert not seen.trajectory("a/0/0")


def test_case_10_one_token_trains_and_no_token_counts_nowhere(learner: Learner, episode: Episode) -> None:
    pair = group(episode("a", 0, sampled=1), episode("a", 1, sampled=4))
    done = step(learner, pair)
    assert settled(done.settlement) == {"trained": [0, 1]}
    assert done.metrics["trained_tokens"] == 5.0
