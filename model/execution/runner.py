"""ModelRunner: a loaded model and its cache on one device. Chunks of sequences go in, sampled tokens come
out.

It loads weights as a stream, is told how large the cache is to be, and runs one step at a time; it knows
neither requests nor text. Not thread-safe: one thread calls it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from model.config.gemma3_config import Gemma3Config
from model.execution.cuda_graphs import CudaGraphDevice, DecodeGraphs, GraphDevice
from model.execution.device_batch import DeviceBatch
from model.execution.out_of_memory import is_out_of_memory, remedy
from model.execution.weight_cache import WeightCache
from model.host.memory import available_memory
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCachePlan, KVCacheSpec
from model.interface.running_batch import IntArray, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, StepInput, StepMemoryError, StepResult
from model.network.forward_batch import StepLayout, forward_batch, lay_out, to_device
from model.network.gemma3 import Gemma3
from model.network.kv_cache import KVCache
from model.network.pending_step import PendingStep
from model.ops.interface import Ops
from model.ops.select import select_ops
from model.precision import compute_type, resolve_quantization
from model.sampling.sampler import Sampler

if TYPE_CHECKING:
    from model.checkpoint.base import Checkpoint

# Rows of logits held at once: 64 of float32 are 64 MiB for a vocabulary of 262 144. Elsewhere than on a CPU,
# each slice costs the host more than the device.
MAX_LOGITS_ROWS, MAX_LOGITS_ROWS_ON_DEVICE = 64, 256
T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve a --dtype value to the compute dtype (``model.precision.compute_type``)."""
    return DTYPES[compute_type(dtype, device.type)]


class Shard(Protocol):
    """The hooks by which one rank of several loads a part of a model."""

    config: Gemma3Config  # config of a network of the part's size

    def divide(self, model: Gemma3) -> None:
        """Replace the layers that span ranks by this rank's part, in a network that has no weights yet."""
        ...

    def tensors(self, whole: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's share of every tensor of a checkpoint."""
        ...


class ModelRunner:
    """Runs one model on one device. Call ``load`` or the constructor, then ``allocate_cache``, then ``run``
    once per step."""

    def __init__(self, model: Gemma3, spec: KVCacheSpec, ops: Ops) -> None:
        self.model = model
        self.config: Gemma3Config = model.config
        self.spec = spec
        self.ops = ops
        self.dtype = str(ops.dtype).removeprefix("torch.")
        self.quantization = ops.quantization
        self.weight_bytes = model.weight_bytes
        self.sampler = Sampler(ops)
        self.max_logits_rows = MAX_LOGITS_ROWS if ops.device.type == "cpu" else MAX_LOGITS_ROWS_ON_DEVICE
        self.cache: KVCache | None = None
        self.mirrors_tables = ops.device.type != "cpu"  # whether the device keeps its own block tables
        self._device_batch: DeviceBatch | None = None
        self._graphs: DecodeGraphs | None = None
        # Total so far; on an asynchronous device this includes waiting for the network.
        self.sample_seconds = 0.0
        # Time until the operations were ready; long only when kernels had to be compiled.
        self.compile_seconds = 0.0
        self._cache_bytes = self._baseline_bytes = 0

    @classmethod
    def load(
        cls,
        checkpoint: "Checkpoint",
        *,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        num_threads: int | None = None,
        quantization: str = "none",
        progress: bool = True,
        num_valid_tokens: int | None = None,
        weight_cache: WeightCache | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Load the weights of a checkpoint, one tensor at a time; the cache comes later, once its size is
        known.

        ``quantization`` is "auto", "none", "int8", "int4" or "fp8". ``num_valid_tokens``: ids from here on
        have no token and are never sampled (a head may have more rows than the tokenizer has tokens); all of
        it when None. ``weight_cache``: where packed weights are kept for the next load. ``shard``: the part
        of the model to load; all of it when None. Raises ConfigError for settings and CheckpointError for
        files.
        """
        target = resolve_device(device)
        torch_dtype = resolve_dtype(dtype, target)
        config = checkpoint.config if shard is None else shard.config
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        began = time.monotonic()
        ops = select_ops(target, torch_dtype, resolve_quantization(quantization, dtype))
        compile_seconds = time.monotonic() - began
        spec = config.kv_cache_spec(block_size, ops.cache_dtype.itemsize)
        num_valid_tokens = min(config.vocab_size, num_valid_tokens or config.vocab_size)
        advice = "Choose --quantization int8, a smaller model or a device with more memory."
        with torch.inference_mode(), remedy("the weights", advice):
            model = Gemma3(config, ops, num_valid_tokens)
            if shard is not None:
                shard.divide(model)
            if weight_cache is None or not weight_cache.restore(model):
                tensors = checkpoint.tensors() if shard is None else shard.tensors(checkpoint.tensors())
                total = sum(math.prod(slot.shape) for slot in model.weight_slots().values())
                model.load_weights(_with_progress(tensors, total, progress))
                if weight_cache is not None:
                    weight_cache.save(model)
        runner = cls(model, spec, ops)
        runner.compile_seconds = compile_seconds
        return runner

    def allocate_cache(self, plan: KVCachePlan) -> None:
        """Allocate the cache of both layer groups. Raises ConfigError when the device has too little
        memory."""
        self._graphs = None  # the graphs hold the addresses of the previous cache
        try:
            self.cache = KVCache(self.config, plan, self.spec.block_size, self.ops.empty_cache)
        except (RuntimeError, MemoryError) as error:
            size = (plan.global_bytes + plan.local_bytes) / 2**30
            setting = "--kv-cache-memory"
            if self.ops.device.type == "cuda":
                setting += " or --gpu-memory-utilization"
            raise ConfigError(
                f"The device has no room for a KV cache of {size:.1f} GiB. Lower {setting}."
            ) from error
        self._cache_bytes = plan.global_bytes + plan.local_bytes
        if self.ops.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.ops.device)
            self._baseline_bytes = torch.cuda.memory_allocated(self.ops.device)

    def release_cache(self) -> None:
        """Free the cache and the graphs that were captured over it."""
        self.cache = self._graphs = self._device_batch = None
        self._cache_bytes = 0

    def capture_graphs(
        self, sizes: Sequence[int], max_model_len: int, device: GraphDevice | None = None
    ) -> None:
        """Capture graphs with which later steps of decodes alone are replayed, padded to the next of the
        ``sizes`` (``cuda_graphs.padded_sizes``).

        Nothing on a CPU, unless a ``device`` for graphs is given.
        """
        if device is None:
            if self.ops.device.type != "cuda":
                return
            device = CudaGraphDevice(self.ops.device)
        with remedy(
            "the CUDA graphs", "Lower --gpu-memory-utilization or --kv-cache-memory, or use --no-cuda-graphs."
        ):
            assert self.cache is not None, "allocate_cache() comes first"
            graphs = DecodeGraphs(self.model, self.cache, self.spec, device, sizes, max_model_len)
            graphs.capture()
        self._graphs = graphs

    def free_memory(self) -> int:
        """Bytes that the device can still give to this process."""
        if self.ops.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.ops.device)[0])
        return available_memory()

    def memory_bytes(self) -> dict[str, int]:
        """Report bytes by what they hold. ``activations_peak`` is the most that a step took beside weights
        and cache; a CPU has no count of it. Must be called by the thread that runs the steps, because a
        device that hangs would block the caller too."""
        sizes = {
            "weights": self.weight_bytes,
            "kv_cache": self._cache_bytes,
            "device_free": self.free_memory(),
        }
        if self.ops.device.type == "cuda":
            sizes["activations_peak"] = max(
                0, torch.cuda.max_memory_allocated(self.ops.device) - self._baseline_bytes
            )
        return sizes

    def warm_up(self) -> None:
        """Run a small prefill and a decode, so that the first request does not pay for lazy initialisation.

        Writes to block 1 of each pool: to be called before any sequence owns a block.
        """
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        for num_tokens in (min(4, self.spec.block_size), 1):
            self.run(
                StepInput.of_prompt([self.config.bos_token_id] * num_tokens, [1], sampling, samples=True)
            )
        self.sample_seconds = 0.0

    def run(self, step: StepInput) -> StepResult:
        """Run one step. Raises StepMemoryError."""
        return self._within_memory(step, keeps_tokens=False).results()

    def launch(self, step: StepInput) -> PendingStep:
        """Hand one step to the device, and wait for it only where more than plain draws is wanted. A step of
        nothing but plain draws leaves its tokens to the next one. Raises StepMemoryError."""
        return self._within_memory(step, keeps_tokens=True)

    def _within_memory(self, step: StepInput, *, keeps_tokens: bool) -> PendingStep:
        try:
            return self._launch(step, keeps_tokens)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Only after the except block: the caught exception's frames hold the failed step's tensors.
        if self.ops.device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepMemoryError(reason)

    @torch.inference_mode()
    def _launch(self, step: StepInput, keeps_tokens: bool) -> PendingStep:
        if not len(step):
            return PendingStep({})
        layout, hidden = self._run_network(step)
        positions = layout.context_lens - step.batch.num_prompt_tokens[layout.rows]  # tokens generated so far
        is_plain = step.is_plain
        if np.count_nonzero(is_plain) == len(is_plain):
            states = hidden if not step.prefills else hidden[to_device(layout.last_tokens, hidden.device)]
            drawn = self._draw(states, step.batch, layout.rows, positions)
            if keeps_tokens:
                self._held(step.batch).keep_tokens(to_device(layout.rows, drawn.device), drawn)
            return PendingStep({}, drawn)
        others = {index: ChunkResult() for index in np.flatnonzero(~is_plain).tolist()}
        self._pool(hidden, step, layout, others)
        self._score_prompts(hidden, step, layout, others)
        self._sample(hidden, step, layout, positions, others)
        plain = np.flatnonzero(is_plain)
        if not len(plain):
            return PendingStep(others)
        states = hidden[to_device(layout.last_tokens[plain], hidden.device)]
        return PendingStep(
            others, self._draw(states, step.batch, layout.rows[plain], positions[plain]), plain
        )

    def _draw(
        self, states: torch.Tensor, batch: RunningBatch, rows: IntArray, positions: IntArray
    ) -> torch.Tensor:
        """Draw plain tokens from final hidden states [k, h] -> int64 [k], -1 where logits are not finite."""
        count, length = len(rows), self.max_logits_rows
        if count <= length:
            return self._draw_slice(states, batch, rows, positions)
        parts = [slice(first, first + length) for first in range(0, count, length)]
        return torch.cat(
            [self._draw_slice(states[part], batch, rows[part], positions[part]) for part in parts]
        )

    def _draw_slice(
        self, states: torch.Tensor, batch: RunningBatch, rows: IntArray, positions: IntArray
    ) -> torch.Tensor:
        token_ids = (
            self.model.greedy(states) if np.count_nonzero(batch.is_greedy[rows]) == len(rows) else None
        )
        if token_ids is None:
            logits = self.model.logits(states)
            began = time.monotonic()
            token_ids = self.sampler.draw_plain(logits, batch, rows, positions)
            self.sample_seconds += time.monotonic() - began
        return token_ids

    @torch.inference_mode()
    def hidden_states(self, step: StepInput) -> torch.Tensor:
        """Compute the final hidden states [n, h] of every token of the step, one sequence after the other;
        writes the cache like ``run``."""
        return self._forward(self._lay_out(step), self._held(step.batch))

    def _run_network(self, step: StepInput) -> tuple[StepLayout, torch.Tensor]:
        """Lay a step out and compute its final hidden states [n, h], which are valid until the next step."""
        layout, on_device = self._lay_out(step), self._held(step.batch)
        if self._graphs is not None and self._graphs.accepts(layout):
            drawn = None
            if layout.token_ids is None:
                drawn = on_device.last_tokens(to_device(layout.rows, self.ops.device))
            return layout, self._graphs.run(layout, self._block_tables(layout, on_device), drawn)
        return layout, self._forward(layout, on_device)

    def _lay_out(self, step: StepInput) -> StepLayout:
        return lay_out(step, self.spec, with_tables=not self.mirrors_tables)

    def _held(self, batch: RunningBatch) -> DeviceBatch:
        """The device's copy of a batch; only that of the last batch is kept."""
        if self._device_batch is None or self._device_batch.batch is not batch:
            self._device_batch = DeviceBatch(batch, self.ops.device, mirrors_tables=self.mirrors_tables)
        return self._device_batch

    def _block_tables(self, layout: StepLayout, on_device: DeviceBatch | None) -> torch.Tensor:
        if layout.block_tables is not None:
            return to_device(layout.block_tables, self.ops.device)
        assert on_device is not None
        on_device.update_tables()
        return on_device.block_tables(to_device(layout.rows, self.ops.device), layout.table_width)

    def _forward(self, layout: StepLayout, on_device: DeviceBatch | None) -> torch.Tensor:
        """Run the network over a step without a graph. ``on_device`` has the tokens or tables that the layout
        leaves out."""
        assert self.cache is not None, "allocate_cache() comes first"
        device = self.ops.device
        if layout.token_ids is not None:
            token_ids = to_device(layout.token_ids, device)
        else:
            assert on_device is not None
            token_ids = on_device.last_tokens(to_device(layout.rows, device))
        batch = forward_batch(layout, token_ids, self._block_tables(layout, on_device), self.spec, device)
        hidden: torch.Tensor = self.model(batch, self.cache)
        return hidden

    def _pool(
        self, hidden: torch.Tensor, step: StepInput, layout: StepLayout, results: dict[int, ChunkResult]
    ) -> None:
        """Sum final hidden states in float64, so that a mean over a whole prompt does not depend on how it
        was cut into chunks."""
        for index, chunk in enumerate(step.prefills, len(step.decodes)):
            if not chunk.pooling:
                continue
            total = hidden[layout.first_tokens[index] : layout.first_tokens[index + 1]].sum(
                0, dtype=torch.float64
            )  # [h]
            if total.isfinite().all():
                results[index].hidden_sum = total.cpu().numpy()
            else:
                results[index].error = NOT_FINITE

    def _sample(
        self,
        hidden: torch.Tensor,
        step: StepInput,
        layout: StepLayout,
        positions: IntArray,
        results: dict[int, ChunkResult],
    ) -> None:
        count = len(step.decodes)
        sampling = [
            index
            for index, result in results.items()
            if result.error is None and (index < count or step.prefills[index - count].samples)
        ]
        for part in _slices(sampling, self.max_logits_rows):
            logits = self.model.logits(hidden[[int(layout.last_tokens[index]) for index in part]])
            began = time.monotonic()
            drawn = self.sampler.sample(logits, step.batch, layout.rows[part], positions[part])
            self.sample_seconds += time.monotonic() - began
            for index, sampled in zip(part, drawn, strict=True):
                results[index].token_ids = sampled.token_ids
                results[index].logprobs = sampled.logprobs
                results[index].error = sampled.error

    def _score_prompts(
        self, hidden: torch.Tensor, step: StepInput, layout: StepLayout, results: dict[int, ChunkResult]
    ) -> None:
        """Compute log-probabilities of prompt tokens, in slices of rows, so that no more than one slice of
        logits exists at a time."""
        # chunk, row of the flat batch, token that follows, alternatives asked for
        rows: list[tuple[int, int, int, int]] = []
        for index, chunk in enumerate(step.prefills, len(step.decodes)):
            count = step.batch.sampling[chunk.row].prompt_logprobs
            if count is None or not chunk.prompt_targets:
                continue
            if any(not 0 <= target < self.model.head.num_valid_tokens for target in chunk.prompt_targets):
                results[
                    index
                ].error = "A prompt token has no log-probability: its id has no token in the vocabulary."
                continue
            first = layout.first_tokens[index]
            rows += [(index, first + i, target, count) for i, target in enumerate(chunk.prompt_targets)]
        for part in _slices(rows, self.max_logits_rows):
            logits = self.model.logits(hidden[[row for _, row, _, _ in part]])
            finite = self.ops.all_finite(logits).tolist()
            targets, counts = [target for _, _, target, _ in part], [count for _, _, _, count in part]
            entries = self.sampler.logprobs(logits, targets, counts, ranks=True)
            for (index, *_), is_finite, entry in zip(part, finite, entries, strict=True):
                if is_finite:
                    results[index].prompt_logprobs.append(entry)
                else:
                    results[index].error = NOT_FINITE


def _slices(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), length):
        yield items[first : first + length]


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device} is not known. Use auto, cpu or cuda.") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no usable CUDA device was found. Use --device cpu.")
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not supported. Use auto, cpu or cuda.")
    return target


def _with_progress(
    tensors: Iterable[tuple[str, torch.Tensor]], total: int, progress: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, of ``total`` parameters in all, with a bar on a terminal's stderr."""
    hidden = None if progress else True  # None: hidden where stderr is no terminal
    with tqdm(total=total, desc="Loading weights", unit="param", unit_scale=True, disable=hidden) as bar:
        for name, tensor in tensors:
            yield name, tensor
            bar.update(tensor.numel())
