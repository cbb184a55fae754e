"""Items of reasoning-gym: the seed makes the question, the dataset scores, wrong answers may be tried again."""

import asyncio
import random
from collections.abc import Iterable
from importlib import import_module

import numpy as np
import pytest

from rollstream.producers.environment import Action, Outcome
from rollstream.producers.environments import Invalid, View, open_environment
from rollstream.producers.environments.reasoning import Asked


def act(text: str) -> Action:
    return Action(text=text, tokens=np.zeros(1, np.int32))


async def play(name: str, seed: int, words: Iterable[str], **options: object) -> list[Outcome]:
    environment = open_environment("reasoning-gym", name, options)()
    outcomes = [await environment.reset({}, seed)]
    for word in words:
        outcomes.append(await environment.step(act(word)))
        if outcomes[-1].done:
            break
    await environment.close()
    return outcomes


def texts(outcomes: list[Outcome]) -> list[str]:
    return [message.content for outcome in outcomes for message in outcome.messages]


def find_answer(name: str, seed: int) -> tuple[str, str]:
    item = import_module("reasoning_gym").create_dataset(name, seed=seed, size=1)[0]
    return str(item["question"]), str(item["answer"])


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "gcd", "word_ladder", "spell_backward"])
async def test_the_seed_makes_the_question_and_the_answer_is_scored(name: str) -> None:
    questions = [texts(await play(name, seed, []))[0] for seed in range(3)]
    assert len(set(questions)) == 3
    question, answer = find_answer(name, 1)
    assert question == questions[1]
    right = (await play(name, 1, [answer]))[-1]
    assert (right.done, right.reward, texts([right])) == (True, 1.0, ["Right."])
    wrong = (await play(name, 1, ["nonsense"]))[-1]
    assert wrong.done
    assert wrong.reward < 1
    assert texts([wrong]) == [f"Wrong. The answer was: {answer}"]


async def test_wrong_answers_may_be_tried_again() -> None:
    _, answer = find_answer("gcd", 4)
    outcomes = await play("gcd", 4, ["no", "neither", answer, "too late"], tries=3)
    assert texts(outcomes)[1:] == [
        "That is not right. Try again; tries left: 2.",
        "That is not right. Try again; tries left: 1.",
        "Right.",
    ]
    assert (outcomes[-1].reward, outcomes[-1].metrics["tries"]) == (1.0, 3.0)
    assert len(await play("gcd", 4, [answer, answer], tries=3)) == 2
    spent = await play("gcd", 4, ["no", "no", "no"], tries=2)
    assert (len(spent), spent[-1].done, spent[-1].reward) == (3, True, 0.0)


async def test_an_answer_stands_between_tags_or_is_the_whole_text() -> None:
    _, answer = find_answer("gcd", 4)
    tagged = f"<think>is it <answer>0</answer>? no</think> So <answer> {answer} </answer>."
    assert (await play("gcd", 4, [tagged]))[-1].reward == 1.0
    assert (await play("gcd", 4, [f"<answer>{answer}"]))[-1].reward == 1.0


async def test_a_scorer_that_cannot_read_an_answer_scores_nothing() -> None:
    assert (await play("prime_factorization", 4, ["no number"]))[-1].reward == 0.0


async def test_settings_of_the_dataset_and_a_view() -> None:
    def read(asked: Asked) -> str:
        return asked.question[-8:] if asked.score is None else f"again {asked.tries}"

    view = View(read=read, act=lambda text: text if text.isdigit() else Invalid(reason="digits"))
    outcomes = await play("chain_sum", 4, ["x", "0", "0"], view=view, forgive=1, tries=2, min_digits=1, max_digits=1)
    question = import_module("reasoning_gym").create_dataset("chain_sum", seed=4, size=1, min_digits=1, max_digits=1)[0]
    assert texts(outcomes)[:3] == [question["question"][-8:], "digits", "again 1"]
    assert outcomes[-1].metrics["invalid_moves"] == 1.0


async def test_parallel_episodes_agree_and_leave_the_global_generator() -> None:
    state = random.getstate()
    make = open_environment("reasoning-gym", "countdown")
    environments = [make() for _ in range(8)]
    openings = await asyncio.gather(*[environments[i].reset({}, i % 2) for i in range(8)])
    assert len({opening.messages for opening in openings}) == 2
    assert openings[0] == openings[2] == openings[4]
    assert random.getstate() == state
    for environment in environments:
        await environment.close()
