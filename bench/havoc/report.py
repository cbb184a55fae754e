"""What a run of the bench tells at its end."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from havoc.journal import Play, lost_plays, played_again
from havoc.killer import Kill
from havoc.plan import RUN
from havoc.scene import Scene
from havoc.tail import read_topics
from havoc.witness import Verdict, judge, read_lineage, receipts_of, samples_asked, stored
from rollstream.consumers.audit import Audit, audit

Report = dict[str, Any]


def make_report(scene: Scene, kills: Sequence[Kill]) -> Report:
    """Audit the run, ask the witness, and count. Everything has come to rest."""
    names = scene.here.names
    found = audit(scene.here.log, names, RUN, scene.here.checkpoints)
    log = list(read_topics(scene.endpoints.bootstrap, scene.topics))
    records = stored(r for r in log if names.environment(r.topic) is not None)
    plays = scene.journal.plays
    manifests = list(read_lineage(lambda key: scene.here.store.get(key).data, RUN))
    witness = judge(
        records,
        receipts_of((r for r in log if r.topic == names.ledger), RUN),
        manifests,
        asked=samples_asked(r for r in log if r.topic == names.tasks),
        told=scene.seen | {p.place: p.name for p in plays if p.acknowledged is not None},
    )
    return {
        "kills": len(kills),
        **judge_outcome(found, witness),
        **count_cost(plays, lost_plays(plays, records), kills),
        "victims": _counted(kill.victim for kill in kills),
        "moments": _counted(kill.moment for kill in kills),
        "steps": manifests[0]["step"] if manifests else 0,
        "receipts": scene.signs.steps,
        "restarts": scene.crew.restarts,
        "died": scene.signs.deaths,
        "broker": scene.plan.broker,
        "brokers": scene.plan.brokers,
        "seed": scene.plan.seed,
    }


def judge_outcome(found: Audit, witness: Verdict) -> Report:
    """The audit's counts; lost and twice are the worse of the two opinions."""
    counts = found.as_json()
    same = (found.acknowledged, found.trained, sum(found.dropped.values()), found.pending, found.lost, found.twice)
    return {
        **{name: counts[name] for name in ("acknowledged", "trained", "dropped", "pending")},
        "lost": max(found.lost, len(witness.lost)),
        "twice": max(found.twice, len(witness.twice)),
        "agreed": same
        == (
            witness.acknowledged,
            witness.trained,
            witness.dropped,
            witness.pending,
            len(witness.lost),
            len(witness.twice),
        ),
        "problems": counts["problems"],
        "witness": witness.as_json(),
    }


def count_cost(plays: Sequence[Play], lost: Sequence[Play], kills: Sequence[Kill]) -> Report:
    """Generation that was for nothing, by its cause and by the kill that it came after; and what was finished and
    played again all the same."""
    seconds, causes = defaultdict[int, float](float), defaultdict[str, float](float)
    for play in lost:
        seconds[play.kill] += play.seconds
        causes[play.cause or ""] += play.seconds
    again = list(played_again(plays))
    total = sum(seconds.values())
    return {
        "generation_seconds": round(sum(play.seconds for play in plays), 1),
        "generation_seconds_lost": round(total, 1),
        "generation_seconds_lost_per_kill": round(total / max(1, len(kills)), 2),
        "generation_seconds_lost_most": round(max(seconds.values(), default=0.0), 1),
        "generation_seconds_lost_by_cause": {cause: round(value, 1) for cause, value in sorted(causes.items())},
        "generation_seconds_lost_before": round(seconds[0], 1),
        "episodes": len(plays),
        "episodes_lost": {
            "under way": sum(play.played is None for play in lost),
            "finished, unacknowledged": sum(play.played is not None for play in lost),
        },
        "finished_again": {"episodes": len(again), "seconds": round(sum(play.seconds for play in again), 1)},
        "each_kill": [
            {
                "number": kill.number,
                "victim": kill.victim,
                "moment": kill.moment,
                "step": kill.step,
                "generation_seconds_lost": round(seconds[kill.number], 2),
            }
            for kill in kills
        ],
    }


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people."""
    witness, lost, again = report["witness"], report["episodes_lost"], report["finished_again"]
    return [
        f"{'kills':<14} {report['kills']}: {_list(report['victims'])}",
        f"{'moments':<14} {_list(report['moments'])}",
        f"{'took':<14} {report['seconds']:.0f} s, {report['steps']} steps, {report['restarts']} roles started again",
        f"{'acknowledged':<14} {report['acknowledged']:,}, {witness['doubles']:,} of them of an id seen before",
        f"{'trained':<14} {report['trained']:,}",
        f"{'dropped':<14} {_list(report['dropped'])}",
        f"{'pending':<14} {report['pending']:,}",
        f"{'lost, twice':<14} {report['lost']}, {report['twice']}; the witness {_verdict(report['agreed'])}",
        f"{'generation':<14} {report['generation_seconds']:,.0f} s in {report['episodes']:,} episodes",
        f"{'of it lost':<14} {report['generation_seconds_lost']:,.1f} s, "
        f"{report['generation_seconds_lost_per_kill']:.2f} s a kill, {_list(lost)}",
        f"{'':<14} {_list(report['generation_seconds_lost_by_cause'])} (seconds)",
        f"{'played again':<14} {again['episodes']:,} finished episodes, {again['seconds']:,.1f} s",
    ]


def _verdict(agreed: bool) -> str:
    return "agrees" if agreed else "DISAGREES"


def _list(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))
