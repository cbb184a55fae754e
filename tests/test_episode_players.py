"""Scripted players in the same loop, with the real renderer and a real game: words tokenized once, repeatable."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from rollstream.infra.tokenizers import word_tokenizer
from rollstream.producers.engine import Completion
from rollstream.producers.environment import EnvironmentFactory, Message
from rollstream.producers.environments import Invalid, View, open_environment
from rollstream.producers.environments.arena import Said
from rollstream.producers.episode import run_episode
from rollstream.producers.limits import Abort, Limits
from rollstream.producers.players import Mixture, Part, Player, play_scripted
from rollstream.producers.rendering import Renderer
from rollstream.schemas import PolicySpan, Sampling, Status, Task, Trajectory, decode, encode

NUMBERS = [str(number) for number in range(1, 51)]
WORDS = [*NUMBERS, "start", "higher", "lower", "no"]
TURNS = "{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
TASK = Task(task_id="t", environment="guess", seed=3, group_size=4, sampling=Sampling(max_tokens=4))


def read(said: tuple[Said, ...]) -> str:
    word = said[-1].text.split()[-1].strip(".")
    return word if word in ("higher", "lower") else "start"


def act(text: str) -> str | Invalid:
    return f"[{text}]" if text in NUMBERS else Invalid(reason="no")


@pytest.fixture
def guess() -> EnvironmentFactory:
    options = {"max_turns": 5, "view": View(read=read, act=act), "forgive": 1}
    return open_environment("textarena", "GuessTheNumber-v0-hardcore-raw", options)


def open_renderer(*, turns: bool) -> Renderer:
    """One token a word; with `turns`, a chat template that opens and closes each turn."""
    tokenizer = word_tokenizer([*WORDS, "<system>", "<user>", "<assistant>", "<end>"] if turns else WORDS)
    if turns:
        tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<user>", "<assistant>"]})
        tokenizer.chat_template = TURNS + PROMPT
    return Renderer(tokenizer)


@pytest.fixture(params=[False, True], ids=["words", "turns"])
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return open_renderer(turns=request.param)


@dataclass
class Bisecting:
    """Halves what is left."""

    name: str = "bisecting"

    def act(self, history: Sequence[Message]) -> str:
        low, high = 1, 50
        for asked, told in zip(history[1::2], history[2::2], strict=True):
            low, high = (int(asked.content) + 1, high) if told.content == "higher" else (low, int(asked.content) - 1)
        return str((low + high) // 2)


@dataclass
class Guessing:
    """Says any number, after a moment."""

    generator: random.Random
    name: str = "guessing"

    async def act(self, history: Sequence[Message]) -> str:
        await asyncio.sleep(0)
        return str(self.generator.randint(1, 50))


@dataclass
class Saying:
    """Says prepared words; raises what is an exception, awaits what can be."""

    words: list[Any]
    name: str = "saying"

    def act(self, history: Sequence[Message]) -> str | Awaitable[str]:
        word = self.words.pop(0)
        if isinstance(word, Exception):
            raise word
        return cast(str | Awaitable[str], word)


def summary(trajectory: Trajectory) -> tuple[object, ...]:
    """What must be the same in a second run."""
    turns = tuple((t.role, t.tokens, t.sampled, t.text, t.finish_reason) for t in trajectory.turns)
    return trajectory.trajectory_id, turns, trajectory.tokens.tolist(), trajectory.reward, trajectory.status


async def test_a_players_words_are_sampled_turns_of_an_unknown_policy(
    guess: EnvironmentFactory, renderer: Renderer
) -> None:
    trajectory = await play_scripted(TASK, 1, guess(), Bisecting(), renderer)
    again = decode(encode(trajectory))
    assert isinstance(again, Trajectory)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0)
    assert (trajectory.model, trajectory.metadata["player"]) == ("", "bisecting")
    assert trajectory.tokenizer == renderer.fingerprint
    assert (trajectory.logprobs.size, trajectory.spans, trajectory.version_range()) == (0, (), None)
    words = [turn.text for turn in trajectory.turns]
    assert words[:4] == ["start", "25", "lower", "12"]
    sampled = trajectory.tokens[trajectory.sampled_mask()].tolist()
    assert sampled == [token for turn in trajectory.turns if turn.sampled for token in renderer.reply(turn.text or "")]
    assert trajectory.turns[-1].tokens == 0
    assert "Congratulations" in (trajectory.turns[-1].text or "")


async def test_all_tokens_are_those_of_the_whole_conversation(guess: EnvironmentFactory) -> None:
    trajectory = await play_scripted(TASK, 1, guess(), Bisecting(), renderer := open_renderer(turns=True))
    messages = [Message(role=turn.role, content=turn.text or "") for turn in trajectory.turns[:-2]]
    whole = [*renderer.opening(messages), *renderer.reply(trajectory.turns[-2].text or "")]
    assert trajectory.tokens.tolist() == whole


class Parrot:
    """An engine that samples prepared words, closed by the end-of-turn token or not."""

    version, model, context = 1, "parrot", 100

    def __init__(self, renderer: Renderer, words: list[str], *, ended: bool) -> None:
        self._renderer, self._words, self._ended = renderer, words, ended
        self.prompts: list[list[int]] = []

    async def generate(self, prompt: Any, sampling: Sampling) -> Completion:
        self.prompts.append(list(prompt))
        ids = list(self._renderer.reply(self._words.pop(0)))
        ids = ids if self._ended else ids[:1]
        return Completion(
            tokens=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            spans=(PolicySpan(version=1, count=len(ids)),),
            finish_reason="stop" if self._ended else "length",
        )

    async def load(self, weights: object, version: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("ended", [True, False])
async def test_with_the_real_renderer_tokens_of_a_turn_are_a_prefix_of_the_next(
    guess: EnvironmentFactory, renderer: Renderer, ended: bool
) -> None:
    engine = Parrot(renderer, ["25", "12", "start", "18", "15", "16"], ended=ended)
    trajectory = await run_episode(TASK, 0, guess(), engine, renderer, Limits())
    assert trajectory.status is Status.COMPLETED
    assert len(engine.prompts) == trajectory.metrics["turns"] == 6
    whole = trajectory.tokens.tolist()
    for prompt in engine.prompts:
        assert whole[: len(prompt)] == prompt
    conversation = " ".join(turn.text or "" for turn in trajectory.turns[:-1])
    assert renderer.decode(whole).split() == conversation.split()


async def test_parallel_players_are_as_good_as_one_after_another(guess: EnvironmentFactory, renderer: Renderer) -> None:
    tasks = [replace(TASK, task_id=f"t{seed}", seed=seed) for seed in range(12)]
    mixture = Mixture([Part(weight=1, make=lambda _: Bisecting()), Part(weight=2, make=Guessing)], seed=5)

    def play(task: Task, index: int) -> Awaitable[Trajectory]:
        return play_scripted(task, index, guess(), mixture.draw(task, index), renderer)

    alone = [summary(await play(task, index)) for task in tasks for index in range(4)]
    together = await asyncio.gather(*[play(task, index) for task in tasks for index in range(4)])
    assert [summary(trajectory) for trajectory in together] == alone
    assert {trajectory.metadata["player"] for trajectory in together} == {"bisecting", "guessing"}


def test_a_mixture_draws_by_weight_and_by_its_seed() -> None:
    parts = [
        Part(weight=3, make=lambda _: Bisecting()),
        Part(weight=1, make=Guessing),
        Part(weight=0, make=lambda _: Saying([])),
    ]
    first, second, other = Mixture(parts, seed=1), Mixture(parts, seed=1), Mixture(parts, seed=2)

    def draw(mixture: Mixture) -> list[str]:
        return [mixture.draw(replace(TASK, task_id=f"t{i}"), i % 4).name for i in range(2000)]

    counts = Counter(draw(first))
    assert set(counts) == {"bisecting", "guessing"}
    assert 0.7 < counts["bisecting"] / 2000 < 0.8
    assert draw(first) == draw(second) != draw(other)
    again = [first.draw(TASK, i) for i in range(50)]
    generators = [player.generator.random() for player in again if isinstance(player, Guessing)]
    assert len(set(generators)) == len(generators) > 1


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0]])
def test_a_mixture_needs_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected weights >= 0 with one above 0"):
        Mixture([Part(weight=weight, make=Guessing) for weight in weights])


async def hang() -> str:
    return await asyncio.Event().wait() and ""


@pytest.mark.parametrize(
    ("player", "status", "cause"),
    [
        (Saying(["25", RuntimeError("lost")]), Status.FAILED, "generate-error"),
        (Saying(["25", "unknown-word"]), Status.FAILED, "generate-error"),
        (Saying(["25", hang()]), Status.FAILED, "generate-timeout"),
        (Saying(["25", "1 2 3 4 5"]), Status.TRUNCATED, "context"),
    ],
)
async def test_a_player_that_fails_is_a_record_too(
    guess: EnvironmentFactory, player: Player, status: Status, cause: str
) -> None:
    limits = Limits(generate_timeout=0.02, max_tokens=5)
    trajectory = await play_scripted(TASK, 0, guess(), player, open_renderer(turns=False), limits)
    assert (trajectory.status, trajectory.cause) == (status, cause)
    assert [turn.text for turn in trajectory.turns[:3]] == ["start", "25", "lower"]
    assert len(trajectory.tokens) == (5 if status is Status.TRUNCATED else 3)


async def test_words_beyond_the_tasks_tokens_are_cut_and_played(guess: EnvironmentFactory) -> None:
    task, player = replace(TASK, sampling=Sampling(max_tokens=1)), Saying(["25 12", "no"])
    trajectory = await play_scripted(task, 0, guess(), player, open_renderer(turns=False), Limits(max_turns=2))
    assert [(turn.text, turn.finish_reason) for turn in trajectory.turns][1:4] == [
        ("25", "length"),
        ("lower", None),
        ("no", "stop"),
    ]
    assert trajectory.cause == "turns"


async def test_a_player_may_be_aborted(guess: EnvironmentFactory) -> None:
    abort = Abort()
    abort.request("enough")
    trajectory = await play_scripted(TASK, 0, guess(), Bisecting(), open_renderer(turns=False), abort=abort)
    assert (trajectory.status, trajectory.metadata["player"]) == (Status.ABORTED, "bisecting")
