"""Replay of a step: the same records on the same state give the same batch, the same loss and the same weights.

    receipt of step n --offsets--> exactly these records --group, score--> the batch ---------------+
    checkpoint n-1 holds the state? --yes--> restore it ------------------------------------------> step n --> compare
                                    --no---> that of the nearest ancestor, the steps between again --+

Everything else that a step depends on stands in its checkpoint (circumstances.py). Nothing is written to log or store.
"""

import contextlib
import hashlib
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..infra.checkpoints import WEIGHTS, Checkpoints, Manifest
from ..infra.claims import Claims
from ..infra.log import Log
from ..infra.models import load_weights, open_model, save_weights
from ..schemas import Consumed, Receipt, Schemas, Trajectory
from .batch import loss_mask
from .circumstances import Circumstances, read_circumstances
from .gatherer import Gathered
from .groups import Group
from .history import History, read_history
from .learner import Learner
from .ledger import Ledger
from .recall import Recall, ReplayError
from .retention import STATE
from .seen import Seen
from .staleness import StalenessGate
from .step import Step, make_step

CLOSE = 1e-5
"""How far the loss may be off where several ranks made the step: one adds up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step and its replay, compared."""

    step: int
    version: int
    """The policy version that the step produced."""
    start: int
    """The policy whose state was restored."""
    steps: int
    """Steps that were made again from there, this one included."""
    samples: int
    """That the step was offered."""
    batch: str
    """SHA-256 of these samples: ids, tokens, log-probabilities, versions, masks, rewards."""
    receipt_loss: float
    replay_loss: float
    differences: tuple[str, ...]
    """What is not the same, bit for bit."""
    remarks: tuple[str, ...]
    """In what this process differs from the trainer's."""
    ranks: int
    """That made the step."""
    settled_alike: bool
    """The same records were trained, and the same dropped for the same reasons."""

    @property
    def identical(self) -> bool:
        return not self.differences

    @property
    def faithful(self) -> bool:
        """Identical; where several ranks made the step: the same batch, and a loss within rounding."""
        if self.ranks == 1:
            return self.identical
        return self.settled_alike and math.isclose(self.receipt_loss, self.replay_loss, rel_tol=CLOSE, abs_tol=CLOSE)

    def as_json(self) -> dict[str, object]:
        """What `rollstream replay --json` prints."""
        return {
            "step": self.step,
            "version": self.version,
            "start": self.start,
            "steps": self.steps,
            "samples": self.samples,
            "batch": self.batch,
            "receipt_loss": self.receipt_loss,
            "replay_loss": self.replay_loss,
            "identical": self.identical,
            "faithful": self.faithful,
            "differences": list(self.differences),
            "remarks": list(self.remarks),
            "ranks": self.ranks,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What it takes to make a step again."""

    start: Manifest
    chain: tuple[Receipt, ...]
    """The steps from there on, oldest first; the last is the one that was asked for."""
    manifest: Manifest
    """The checkpoint of that one."""
    told: Circumstances


class Replayer:
    """Replays steps of one run."""

    def __init__(
        self, log: Log, ledger: Ledger, checkpoints: Checkpoints, claims: Claims, schemas: Schemas, *, scratch: Path
    ) -> None:
        """`claims`, `schemas`: to read trajectories with. `scratch`: a folder for fetched checkpoints."""
        self._recall, self._ledger = Recall(log, claims, schemas), ledger
        self._checkpoints, self._scratch = checkpoints, scratch

    def replay(self, step: int, *, version: int | None = None) -> Replay:
        """Make step `step` on the lineage of the latest checkpoint again, or on that of this version's.

        Raises `ReplayError` for a step without a receipt or whose records are gone, `CheckpointError` where the state
        is, `LogError`, `StoreError`.
        """
        plan = self._plan(step, version)
        with _threads(plan.told.threads):
            learner = self._restore(plan)
            for receipt in plan.chain[:-1]:
                _repeat(receipt, self._recall.groups(receipt), learner)
            groups = self._recall.groups(plan.chain[-1])
            done = _repeat(plan.chain[-1], groups, learner)
            return _compare(plan, groups, done, self._digests(learner))

    def _plan(self, step: int, version: int | None) -> _Plan:
        tip = self._checkpoints.latest() if version is None else self._checkpoints.manifest(version)
        if tip is None:
            raise ReplayError(f"run {self._checkpoints.run} has no checkpoint yet; `rollstream train` publishes them")
        history = read_history(self._ledger, self._checkpoints, tip)
        receipt = _find(history, step, tip)
        chain = [receipt]
        start = self._checkpoints.manifest(receipt.parent)
        # Without the state the trainer has not stopped there: a restart goes back to a checkpoint that has it.
        while STATE not in start.files and start.incarnation == receipt.incarnation:
            chain.append(_find(history, start.step, tip))
            start = self._checkpoints.manifest(chain[-1].parent)
        manifest = self._checkpoints.manifest(receipt.version)
        return _Plan(start=start, chain=tuple(chain[::-1]), manifest=manifest, told=read_circumstances(manifest))

    def _restore(self, plan: _Plan) -> Learner:
        """A learner as the trainer had it before the first step of the chain."""
        settings, start = plan.told.learner, plan.start
        folder = self._fetch(start, "")
        model = open_model(folder / WEIGHTS, device=_device(plan.told))
        alike = start.metadata.get("objective") == settings.objective.value
        state = _load_state(folder) if alike and STATE in start.files else None
        if settings.kl and (state is None or state["reference"] is None):
            model.load_state_dict(self._reference(plan))
        learner = Learner(model, settings)
        if state is not None:
            learner.load_state_dict(state)
        else:
            load_weights(learner.model, folder / WEIGHTS)
        return learner

    def _reference(self, plan: _Plan) -> dict[str, Any]:
        """The reference model that was given to the trainer: its next checkpoint with a state holds it."""
        for receipt in plan.chain:
            manifest = self._checkpoints.manifest(receipt.version)
            if STATE in manifest.files:
                reference: dict[str, Any] | None = _load_state(self._fetch(manifest, STATE))["reference"]
                if reference is not None:
                    return reference
        raise ReplayError(
            f"step {plan.chain[-1].step} penalised leaving a reference model that stands in no checkpoint up to it; "
            f"replay a step from policy {plan.start.version} on whose checkpoint holds the trainer's state"
        )

    def _fetch(self, manifest: Manifest, prefix: str) -> Path:
        folder = self._scratch / f"policy-{manifest.version}"
        self._checkpoints.fetch(manifest, prefix, folder)
        return folder

    def _digests(self, learner: Learner) -> dict[str, str]:
        """SHA-256 of the files of the weights, by their names in a checkpoint."""
        folder = self._scratch / "replayed"
        save_weights(learner.model, folder)
        return {WEIGHTS + path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _find(history: History, step: int, tip: Manifest) -> Receipt:
    receipt = history.at_step(step)
    if receipt is None:
        there = sorted(r.step for r in history.receipts)
        raise ReplayError(
            f"step {step} has no receipt on the lineage of policy {tip.version}; there are those of "
            f"{f'steps {there[0]} to {there[-1]}' if there else 'no step'}. --version takes another lineage"
        )
    if not receipt.parent:
        raise ReplayError(f"step {step} published the first weights of the run: nothing was trained, nor can be again")
    return receipt


def _load_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return state


def _device(told: Circumstances) -> str:
    return told.device if told.device != "cuda" or torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _threads(count: int) -> Generator[None]:
    """With so many threads of torch, among which sums are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _repeat(receipt: Receipt, groups: tuple[Group, ...], learner: Learner) -> Step:
    # Whoever was stale is a drop of the receipt; what was offered was judged.
    gate = StalenessGate(None, receipt.parent)
    return make_step(Gathered(groups=groups, idle=0.0), learner, gate, Seen(max_staleness=None))


def _compare(plan: _Plan, groups: tuple[Group, ...], done: Step, digests: dict[str, str]) -> Replay:
    receipt, members = plan.chain[-1], [m.trajectory for group in groups for m in group.members]
    settled_alike = _columns(receipt.consumed) == _columns(done.settlement.consumed())
    differences = [] if settled_alike else ["the records that were trained and dropped"]
    differences += [name for name, there, here in _numbers(receipt, done) if not _same(there, here)]
    files = {name: file.sha256 for name, file in plan.manifest.files.items() if name in digests}
    differences += [name for name, digest in digests.items() if files.get(name) != digest]
    device = [] if _device(plan.told) == plan.told.device else [f"device: {plan.told.device} then, cpu now"]
    return Replay(
        step=receipt.step,
        version=receipt.version,
        start=plan.start.version,
        steps=len(plan.chain),
        samples=len(members),
        batch=batch_digest(members),
        receipt_loss=receipt.loss,
        replay_loss=done.result.loss,
        differences=tuple(differences),
        remarks=(*plan.told.differing(), *device),
        ranks=plan.told.ranks,
        settled_alike=settled_alike,
    )


def _numbers(receipt: Receipt, done: Step) -> Iterator[tuple[str, float | None, float]]:
    yield "loss", receipt.loss, done.result.loss
    yield from ((name, receipt.metrics.get(name), value) for name, value in sorted(done.metrics.items()))


def _same(there: float | None, here: float) -> bool:
    return there is not None and (there == here or (math.isnan(there) and math.isnan(here)))


def _columns(consumed: tuple[Consumed, ...]) -> dict[tuple[str, int, str], list[int]]:
    columns = {(c.topic, c.partition, ""): c.trained.tolist() for c in consumed}
    columns |= {(c.topic, c.partition, reason): o.tolist() for c in consumed for reason, o in c.dropped.items()}
    return {key: offsets for key, offsets in columns.items() if offsets}


def batch_digest(trajectories: list[Trajectory]) -> str:
    """SHA-256 over all that trajectories tell a step, in the order in which it takes them."""
    digest = hashlib.sha256()
    for t in sorted(trajectories, key=lambda t: (t.group_id, t.sample_index, t.trajectory_id)):
        digest.update(repr((t.group_id, t.sample_index, t.trajectory_id, t.reward, t.temperature)).encode())
        for column in (t.tokens, t.logprobs, t.versions(), loss_mask(t)):
            digest.update(f"{column.dtype}{column.shape}".encode() + column.tobytes())
    return digest.hexdigest()
