"""Tokens per second of the engines, beside `model.generate` on the same model.

    python bench/engine.py [--engine transformers vllm] [--rounds 5] [--json]

    turns      64 episodes at once on one small Llama, one sampled token a turn: a prompt of 5 tokens grows by 2 a turn
               to 59, and every turn is a request of its own
    64 x 16    64 prompts of 20 tokens, 16 sampled tokens each, asked at once
    generate   the same 64 x 16 by `model.generate`: no log-probabilities, no requests, one batch

Every engine plays a round after the other, so that a busy machine slows all of them alike; medians are printed. Threads
are those of OMP_NUM_THREADS. `ratio` is over `generate`, of sampled tokens.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rollstream.infra.models import open_model, tiny_llama
from rollstream.producers.engine import Engine
from rollstream.producers.engines import ENGINES, open_engine
from rollstream.schemas import Sampling

VOCABULARY = 64
EPISODES = 64
FIRST, LAST = 5, 59
PROMPT, SAMPLED = 20, 16


async def play_turns(engine: Engine) -> dict[str, float]:
    """Play 64 episodes and measure, in tokens per second."""
    turns = prompts = 0

    async def play(seed: int) -> None:
        nonlocal turns, prompts
        chance = random.Random(seed)
        tokens = [chance.randrange(VOCABULARY) for _ in range(FIRST)]
        while len(tokens) <= LAST:
            completion = await engine.generate(np.array(tokens, np.int32), Sampling(max_tokens=1))
            turns += 1
            prompts += len(tokens)
            tokens += [*completion.tokens.tolist(), chance.randrange(VOCABULARY)]

    began = time.perf_counter()
    await asyncio.gather(*(play(seed) for seed in range(EPISODES)))
    seconds = time.perf_counter() - began
    return {"turns": turns / seconds, "turns with prompts": (turns + prompts) / seconds}


async def sample_batch(engine: Engine) -> dict[str, float]:
    prompts = make_prompts()
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=SAMPLED)) for prompt in prompts))
    return {"64 x 16": EPISODES * SAMPLED / (time.perf_counter() - began)}


def make_prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(EPISODES)]


def run_generate(model: Any) -> dict[str, float]:
    ids = torch.tensor(make_prompts())
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=SAMPLED, do_sample=True, top_k=0)
    return {"64 x 16": EPISODES * SAMPLED / (time.perf_counter() - began)}


async def measure(kinds: Sequence[str], rounds: int, directory: Path) -> dict[str, dict[str, float]]:
    """Name -> figure -> median over the rounds; a round before them warms up."""
    tiny_llama(directory, vocabulary=VOCABULARY)
    model = open_model(directory)
    engines = {kind: open_engine(kind, directory, max_batch=EPISODES) for kind in kinds}
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ("generate", *kinds)}
    for _ in range(rounds + 1):
        seen["generate"].append(run_generate(model))
        for kind, engine in engines.items():
            seen[kind].append(await play_turns(engine) | await sample_batch(engine))
    for engine in engines.values():
        await engine.close()
    figures = {
        name: {figure: median(one[figure] for one in found[1:]) for figure in found[0]} for name, found in seen.items()
    }
    for found in figures.values():
        found["ratio"] = found["64 x 16"] / figures["generate"]["64 x 16"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [kind for kind in ENGINES if kind != "vllm" or find_spec("vllm")]
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=installed, help="default: all installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options.engine, options.rounds, Path(folder)))
    if options.json:
        print(json.dumps(figures))
        return
    columns = ["turns", "turns with prompts", "64 x 16", "ratio"]
    print(f"{'tokens/s':14}" + "".join(f"{column:>20}" for column in columns))
    for name, found in figures.items():
        cells = (f"{found[c]:.2f}" if c == "ratio" else f"{found[c]:,.0f}" if c in found else "" for c in columns)
        print(f"{name:14}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
