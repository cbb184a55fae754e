"""After the last kill: everything comes to rest, and nothing stays pending that could be settled.

all servers serve -> dispatcher stops -> workers finish every task, and stop -> trainer stops
                  -> the trainer once more, up to the end of the log
"""

import time
from collections.abc import Callable

from havoc.scene import Scene
from rollstream.infra.log import LogError
from rollstream.infra.scan import find_ends

PATIENCE = 180.0
"""Seconds for each thing that has to come."""
ASK_EVERY = 0.5


class Restless(Exception):
    """Something did not come to rest."""


def come_to_rest(scene: Scene, tell: Callable[[str], None]) -> None:
    """Raises `Restless` where that takes too long, `StackError` for who does not stay alive."""
    _await(scene, "all servers serve", lambda: all(map(scene.ready, scene.stack.components)))
    scene.crew.stop("dispatcher")
    tell("no more kills, no more tasks; the workers finish those there are")
    _await(scene, "every task is finished", lambda: _tasks_finished(scene))
    scene.crew.stop(*scene.workers)
    scene.look()
    tell("every task is finished; the trainer settles what is left")
    scene.crew.stop("trainer")
    scene.start("drain", "-v", "train", "--until-end")
    _await(scene, "the log is settled", lambda: scene.crew.done("drain"))


def _await(scene: Scene, what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    asked = 0.0
    while time.monotonic() - asked < ASK_EVERY or not true():
        if time.monotonic() - asked >= ASK_EVERY:
            asked = time.monotonic()
        if time.monotonic() > deadline:
            raise Restless(f"not within {PATIENCE:.0f} s: {what}; the logs in {scene.plan.logs} tell more")
        scene.look()


def _tasks_finished(scene: Scene) -> bool:
    """The workers' group has committed every task: its samples are acknowledged."""
    log, names = scene.here.log, scene.here.names
    try:
        ends = find_ends(log, log.partitions(names.tasks))
        marks = log.committed(f"{names.namespace}.workers", ends)
    except LogError:
        return False
    return all(marks.get(partition, 0) >= end for partition, end in ends.items())
