"""The demo's loop under kill -9 of everything: what is lost, what is trained twice, what a crash costs.

    python bench/chaos.py --kills 50 --seed 1                                  # Tansu and SeaweedFS
    python bench/chaos.py --kills 50 --seed 1 --broker kafka --brokers 3       # Apache Kafka from KAFKA_HOME
    python bench/chaos.py --kills 10 --victims trainer,dispatcher --json

Real processes under real servers: a dispatcher, two workers, a trainer, a broker (or three, one killed at a time), an
object store. After the last kill everything comes to rest; then `rollstream audit` and a witness that shares no code
with it say what became of every acknowledged trajectory. Exits 1 where something was lost or trained twice, or where
the two do not agree. See docs/chaos.md.
"""

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from havoc.killer import Kill, Killer
from havoc.plan import KINDS, Plan
from havoc.report import as_lines, make_report
from havoc.rest import Restless, come_to_rest
from havoc.scene import Scene
from rollstream.infra.stack import StackError

WARM_UP = 180.0
"""Seconds that the first step may take."""
STALLED = 180.0
"""Seconds without a step or a kill after which a run is given up."""


def main() -> int:
    options = parse_arguments()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="rollstream-chaos-"))
    plan = Plan(
        folder=folder.absolute(),
        kills=options.kills,
        seed=options.seed,
        broker="kafka" if options.broker == "kafka" else "tansu",
        brokers=options.brokers or (3 if options.broker == "kafka" else 1),
        victims=frozenset(options.victims.split(",")) if options.victims else frozenset(),
    )
    prepare_environment(plan.folder)
    try:
        report = run_chaos(plan)
    except (StackError, Restless, TimeoutError) as error:
        print(f"chaos: {error}; everything is kept in {folder}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if options.json else "\n".join(as_lines(report)))
    if report["lost"] or report["twice"] or not report["agreed"]:
        print(f"chaos: NOT clean; everything is kept in {folder}", file=sys.stderr)
        return 1
    if options.dir is None:
        shutil.rmtree(folder)
    return 0


def prepare_environment(folder: Path) -> None:
    """What this process and its children share."""
    # The workers open the games of this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.getenv("PYTHONPATH"))))
    # Roles are started dozens of times: where bytecode is kept nowhere, each start would compile torch for 15 s.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the victims, the instants, the model and the tasks")
    parser.add_argument("--broker", choices=("embedded", "kafka"), default="embedded")
    parser.add_argument("--brokers", type=int, choices=(1, 3), help="of Apache Kafka; else 3")
    parser.add_argument("--victims", help=f"kill only these, comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--dir", type=Path, help="data and logs, kept; else a temporary folder, kept if not clean")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.victims and (unknown := set(options.victims.split(",")) - set(KINDS)):
        parser.error(f"--victims: expected some of {', '.join(KINDS)}, found {', '.join(sorted(unknown))}")
    return options


def run_chaos(plan: Plan) -> dict[str, object]:
    """Start, kill, come to rest, judge."""
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    logging.basicConfig(level=logging.ERROR)
    victims, outages = random.Random(f"victims {plan.seed}"), random.Random(f"outages {plan.seed}")
    tell(f"{plan.broker} and everything around it, in {plan.folder}")
    with Scene(plan, outages) as scene:
        await_step(scene)
        tell("the first step is made")
        kills = kill_all(scene, victims, tell)
        come_to_rest(scene, tell)
        tell("the audit, and the witness")
        report = make_report(scene, kills)
    return {**report, "seconds": round(time.monotonic() - began, 1)}


def await_step(scene: Scene) -> None:
    """Until the first policy after the initial one is under way. The dispatcher starts when all workers serve."""
    deadline = time.monotonic() + WARM_UP
    dispatched = False
    while scene.signs.steps < 2:
        if time.monotonic() > deadline:
            raise Restless(f"no step within {WARM_UP:.0f} s; the logs in {scene.plan.logs} tell more")
        scene.look()
        if not dispatched and scene.serving == set(scene.workers):
            scene.start("dispatcher", "dispatch")
            dispatched = True


def kill_all(scene: Scene, rng: random.Random, tell: Callable[[str], None]) -> list[Kill]:
    killer = Killer(scene, rng)
    last, steps = time.monotonic(), scene.signs.steps
    while len(killer.done) < scene.plan.kills:
        scene.look()
        if kill := killer.look():
            tell(f"kill {kill.number}: {kill.victim} ({kill.moment}), after step {kill.step}")
        if kill or scene.signs.steps != steps:
            last, steps = time.monotonic(), scene.signs.steps
        if time.monotonic() - last > STALLED:
            raise Restless(f"neither a step nor a kill within {STALLED:.0f} s; the logs in {scene.plan.logs} tell more")
    return killer.done


if __name__ == "__main__":
    sys.exit(main())
