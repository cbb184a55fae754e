"""What every threaded engine promises, held on a scripted backend whose steps the test releases one by one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollstream.infra.weights import WeightsError
from rollstream.producers.engine import Completion, EngineError, EngineLost, PromptTooLong
from rollstream.producers.engines.backend import Delta, Request
from rollstream.producers.engines.threaded import ThreadedEngine
from rollstream.schemas import PolicySpan, Sampling

FINITE = -0.5


@dataclass(eq=False)
class Script:
    """A backend that counts up from the last prompt token; every step waits for a permit."""

    context: int = 32
    vocabulary: int = 100
    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    batches: list[list[int]] = field(default_factory=list[list[int]])
    """Prompt lengths of the requests in each step."""
    rows: dict[int, tuple[Request, int]] = field(default_factory=dict[int, tuple[Request, int]])
    logprob: float = FINITE
    failing: dict[str, Exception] = field(default_factory=dict[str, Exception])
    """Method -> what its next call raises."""
    closed: bool = False

    def add(self, request: Request) -> None:
        self._raise("add")
        self.rows[request.key] = (request, 0)

    def abort(self, key: int) -> None:
        self._raise("abort")
        self.rows.pop(key, None)

    def step(self) -> list[Delta]:
        assert self.permits.acquire(timeout=20)
        self._raise("step")
        self.batches.append([len(request.prompt) for request, _ in self.rows.values()])
        deltas: list[Delta] = []
        for key, (request, sampled) in list(self.rows.items()):
            done = sampled + 1 == request.sampling.max_tokens
            deltas.append(
                Delta(key, (int(request.prompt[-1]) + sampled + 1,), (self.logprob,), "length" if done else None)
            )
            self.rows[key] = (request, sampled + 1)
            if done:
                del self.rows[key]
        return deltas

    def read(self, directory: Path) -> Mapping[str, Any]:
        if directory.name == "broken":
            raise WeightsError("one weight expected, none found")
        return {}

    def swap(self, weights: Mapping[str, Any]) -> None:
        self._raise("swap")

    def close(self) -> None:
        self.closed = True

    def _raise(self, method: str) -> None:
        if (error := self.failing.pop(method, None)) is not None:
            raise error


@pytest.fixture
def script() -> Script:
    return Script()


@pytest_asyncio.fixture
async def engine(script: Script) -> AsyncIterator[ThreadedEngine]:
    engine = ThreadedEngine(lambda: script, model="script", version=3)
    yield engine
    script.permits.release(1000)
    await engine.close()
    assert script.closed


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the state is another thread's
            await asyncio.sleep(0)


async def test_requests_of_one_loop_turn_share_every_step(engine: ThreadedEngine, script: Script) -> None:
    script.permits.release(2)
    prompts = [[5], [6, 7], [8, 9, 10]]
    completions = await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=2)) for prompt in prompts))
    assert script.batches == [[1, 2, 3], [1, 2, 3]]
    assert [completion.tokens.tolist() for completion in completions] == [[6, 7], [8, 9], [11, 12]]
    first = completions[0]
    assert first.tokens.dtype == np.int32
    assert first.logprobs.dtype == np.float32
    assert first.logprobs.tolist() == [FINITE, FINITE]
    assert first.finish_reason == "length"
    assert first.spans == (PolicySpan(version=3, count=2),)


async def test_a_request_joins_between_two_steps(engine: ThreadedEngine, script: Script) -> None:
    long = asyncio.create_task(engine.generate([1], Sampling(max_tokens=3)))
    script.permits.release()
    await until(lambda: len(script.batches) == 1)
    short = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=1)))
    await until(lambda: engine._inbox.qsize() == 1)  # pyright: ignore[reportPrivateUsage]
    script.permits.release(3)
    await asyncio.gather(long, short)
    # The engine may have begun to wait for its second permit before the order came.
    assert script.batches in ([[1], [1, 2], [1]], [[1], [1], [1, 2]])


async def test_a_swap_in_mid_generation_gives_two_spans(engine: ThreadedEngine, script: Script) -> None:
    task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=5)))
    script.permits.release()
    await until(lambda: len(script.batches) == 1)
    load = asyncio.create_task(engine.load(Path("new"), 7))
    await until(lambda: engine._inbox.qsize() == 1)  # pyright: ignore[reportPrivateUsage]
    assert engine.version == 3
    script.permits.release(4)
    await load
    assert engine.version == 7
    completion = await task
    assert [span.version for span in completion.spans] == [3, 7]
    assert sum(span.count for span in completion.spans) == len(completion.tokens) == 5
    assert completion.spans[0].count in (1, 2)


async def test_weights_that_do_not_fit_leave_version_and_requests_alone(engine: ThreadedEngine, script: Script) -> None:
    with pytest.raises(EngineError, match=r"version 9 not loaded, version 3 stays: one weight expected"):
        await engine.load(Path("broken"), 9)
    script.permits.release()
    completion = await engine.generate([1], Sampling(max_tokens=1))
    assert completion.spans == (PolicySpan(version=3, count=1),)


async def test_a_failed_swap_ends_the_engine(engine: ThreadedEngine, script: Script) -> None:
    script.failing["swap"] = MemoryError("no room")
    waiting = await begin(engine, script, 2)
    load = asyncio.create_task(engine.load(Path("new"), 4))
    await until(lambda: engine._inbox.qsize() == 1)  # pyright: ignore[reportPrivateUsage]
    script.permits.release(1)
    for task in (*waiting, load):
        with pytest.raises(EngineLost, match=r"swapped weights: MemoryError\('no room'\)$"):
            await task
    with pytest.raises(EngineLost, match="swapped weights"):
        await engine.generate([1], Sampling(max_tokens=1))
    with pytest.raises(EngineLost, match="swapped weights"):
        await engine.load(Path("new"), 5)
    assert engine.version == 3


async def test_what_waits_behind_a_swap_that_fails_is_not_done(
    engine: ThreadedEngine, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapping, proceed = threading.Event(), threading.Event()

    def swap(_weights: Mapping[str, Any]) -> None:
        assert not swapping.is_set(), "swapped once more"
        swapping.set()
        assert proceed.wait(20)
        raise MemoryError("no room")

    monkeypatch.setattr(script, "swap", swap)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(engine.load(Path("new"), 4))]
    await until(swapping.is_set)
    tasks.append(asyncio.create_task(engine.generate([1], Sampling(max_tokens=1))))
    await until(lambda: engine._inbox.qsize() == 1)  # pyright: ignore[reportPrivateUsage]
    tasks.append(asyncio.create_task(engine.load(Path("new"), 5)))
    await until(lambda: engine._inbox.qsize() == 2)  # pyright: ignore[reportPrivateUsage]
    proceed.set()
    for task in tasks:
        with pytest.raises(EngineLost, match=r"swapped weights: MemoryError\('no room'\)$"):
            await task
    assert (engine.version, script.rows) == (3, {})


async def begin(engine: ThreadedEngine, script: Script, count: int) -> "list[asyncio.Task[Completion]]":
    """Long requests, one step into them."""
    tasks = [asyncio.create_task(engine.generate([1], Sampling(max_tokens=9))) for _ in range(count)]
    script.permits.release()
    await until(lambda: len(script.batches) == 1)
    return tasks


async def test_cancelling_frees_the_place(engine: ThreadedEngine, script: Script) -> None:
    tasks = [asyncio.create_task(engine.generate([1] * n, Sampling(max_tokens=9))) for n in (1, 2)]
    script.permits.release()
    await until(lambda: len(script.batches) == 1)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await until(lambda: engine._inbox.qsize() == 1)  # pyright: ignore[reportPrivateUsage]
    script.permits.release(8)
    assert len((await tasks[1]).tokens) == 9
    assert tasks[0].cancelled()
    assert script.batches[-1] == [2]
    assert script.batches.count([1, 2]) <= 2


async def test_cancelled_before_the_engine_heard_of_it(engine: ThreadedEngine, script: Script) -> None:
    task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=9)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    script.permits.release(2)
    await engine.generate([1, 2], Sampling(max_tokens=1))
    assert script.batches[-1] == [2]


async def test_a_failing_step_fails_its_requests_and_no_others(engine: ThreadedEngine, script: Script) -> None:
    script.failing["step"] = RuntimeError("bad kernel")
    script.permits.release(2)
    results = await asyncio.gather(
        *(engine.generate([1], Sampling(max_tokens=1)) for _ in range(2)), return_exceptions=True
    )
    assert all(type(result) is EngineError and "bad kernel" in str(result) for result in results)
    assert script.rows == {}
    assert (await engine.generate([1], Sampling(max_tokens=1))).tokens.tolist() == [2]


async def test_a_request_the_backend_refuses_fails_alone(engine: ThreadedEngine, script: Script) -> None:
    script.failing["add"] = ValueError("not this one")
    script.permits.release()
    refused, taken = await asyncio.gather(
        *(engine.generate([n], Sampling(max_tokens=1)) for n in (1, 2)), return_exceptions=True
    )
    assert type(refused) is EngineError
    assert "not this one" in str(refused)
    assert not isinstance(taken, BaseException)
    assert taken.tokens.tolist() == [3]


async def test_a_backend_that_cannot_forget_is_given_up(engine: ThreadedEngine, script: Script) -> None:
    script.failing |= {"step": RuntimeError("bad kernel"), "abort": RuntimeError("and worse")}
    script.permits.release()
    with pytest.raises(EngineLost, match="bad kernel"):
        await engine.generate([1], Sampling(max_tokens=1))
    with pytest.raises(EngineLost, match="and worse"):
        await engine.generate([1], Sampling(max_tokens=1))


async def test_a_cancelled_request_that_stays_in_the_batch_ends_the_others(
    engine: ThreadedEngine, script: Script
) -> None:
    first, second = await begin(engine, script, 2)
    script.failing["abort"] = RuntimeError("cannot forget")
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: engine._inbox.qsize() == 1)  # pyright: ignore[reportPrivateUsage]
    script.permits.release(1)
    with pytest.raises(EngineLost, match="cannot forget"):
        await second


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
async def test_a_log_probability_that_is_none_never_leaves(
    engine: ThreadedEngine, script: Script, logprob: float
) -> None:
    script.logprob = logprob
    script.permits.release()
    with pytest.raises(EngineError, match="weights of version 3 finite"):
        await engine.generate([1], Sampling(max_tokens=1))


async def test_the_context_ends_a_completion(engine: ThreadedEngine, script: Script) -> None:
    script.permits.release(2)
    completion = await engine.generate([1] * 30, Sampling(max_tokens=50))
    assert len(completion.tokens) == 2
    assert completion.finish_reason == "length"


async def test_a_prompt_that_fills_the_context_is_refused(engine: ThreadedEngine) -> None:
    with pytest.raises(PromptTooLong, match=r"32 tokens.* context of 32") as caught:
        await engine.generate([1] * 32, Sampling(max_tokens=1))
    assert (caught.value.prompt, caught.value.context) == (32, 32)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "at least one token"),
        ([[1]], Sampling(), "at least one token"),
        ([2**40], Sampling(), "token ids .int32. expected"),
        ([[1], [2, 3]], Sampling(), "token ids .int32. expected"),
        (["a"], Sampling(), "token ids .int32. expected"),
        ([100], Sampling(), "from 0 to 99 expected, 100 to 100 given"),
        ([-1, 5], Sampling(), "-1 to 5 given"),
        ([1], Sampling(max_tokens=0), "max_tokens >= 1"),
        ([1], Sampling(temperature=-1), "temperature 0 .greedy. or >= 0.01"),
        ([1], Sampling(temperature=0.001), "temperature 0 .greedy. or >= 0.01"),
        ([1], Sampling(temperature=float("nan")), "temperature 0 .greedy. or >= 0.01"),
        ([1], Sampling(temperature=float("inf")), "temperature 0 .greedy. or >= 0.01"),
        ([1], Sampling(top_p=0), "0 < top_p <= 1"),
        ([1], Sampling(top_k=-1), "top_k >= 0"),
    ],
)
async def test_requests_that_make_no_sense(
    engine: ThreadedEngine, prompt: Any, sampling: Sampling, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await engine.generate(prompt, sampling)


async def test_close_fails_what_is_under_way_and_what_comes_after(script: Script) -> None:
    engine = ThreadedEngine(lambda: script, model="script", version=0)
    task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=9)))
    script.permits.release()
    await until(lambda: len(script.batches) == 1)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    script.permits.release()
    await closing
    with pytest.raises(EngineLost, match="closed"):
        await task
    with pytest.raises(EngineLost, match="closed"):
        await engine.generate([1], Sampling(max_tokens=1))
    with pytest.raises(EngineLost, match="closed"):
        await engine.load(Path("new"), 1)
    await engine.close()
    assert script.closed


async def test_close_while_weights_are_read(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ThreadedEngine(lambda: script, model="script", version=0)
    reading, proceed = threading.Event(), threading.Event()

    def read(_directory: Path) -> Mapping[str, Any]:
        reading.set()
        assert proceed.wait(20)
        return {}

    monkeypatch.setattr(script, "read", read)
    load = asyncio.create_task(engine.load(Path("new"), 1))
    await until(reading.is_set)
    await engine.close()
    proceed.set()
    with pytest.raises(EngineLost, match="closed"):
        await load


def test_opening_raises_what_the_backend_raises() -> None:
    def fail() -> Script:
        raise OSError("no such directory")

    with pytest.raises(OSError, match="no such directory"):
        ThreadedEngine(fail, model="script", version=0)


def test_an_engine_outlives_an_event_loop(script: Script) -> None:
    engine = ThreadedEngine(lambda: script, model="script", version=0)
    script.permits.release(2)
    for _ in range(2):
        assert asyncio.run(engine.generate([1], Sampling(max_tokens=1))).tokens.tolist() == [2]
    asyncio.run(engine.close())
