"""What a device's memory goes to, measured before the cache gets the rest: weights, the most that a step
takes beside them, CUDA graphs, and whatever else is on the device. Where memory runs out at a start, the
error names the setting to change."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from model.execution.cuda_graphs import CudaGraphDevice, DecodeGraphs, GraphDevice, padded_sizes
from model.execution.out_of_memory import remedy
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCachePlan, ceil_div
from model.interface.running_batch import NULL_BLOCK, RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import SequenceChunk, StepInput

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner

logger = logging.getLogger(__name__)

GIB = 2**30
# The settings that take the most memory: a draw from the whole vocabulary, and log-probabilities.
_DEAREST = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95, logprobs=20)


class DeviceMemory(Protocol):
    """Readings of a device's memory, in bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """Memory that any process could still take."""
        ...

    def allocated(self) -> int:
        """Memory in tensors of this process."""
        ...

    def peak(self) -> int:
        """The largest value of ``allocated`` since ``reset_peak``."""
        ...

    def reset_peak(self) -> None: ...

    def release(self) -> None:
        """Return the memory that this process holds for later tensors, so that ``free`` shows what is really
        taken."""
        ...


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The uses of a device's memory while no cache is allocated, in bytes."""

    total: int
    weights: int
    activations: int  # the largest need of a step beside the weights
    graphs: int
    other: int  # the driver's context, compiled kernels, other processes

    def cache_bytes(self, utilization: float) -> int:
        """The bytes that the cache may take when ``utilization`` of the device is to be used. Raises
        ConfigError when nothing is left."""
        rest = int(self.total * utilization) - self.weights - self.activations - self.graphs - self.other
        if rest > 0:
            return rest
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g} of {self.total / GIB:.1f} GiB leaves nothing for the "
            f"KV cache: {self.text()}. Raise --gpu-memory-utilization, lower --max-num-batched-tokens or "
            "--max-num-seqs, choose --quantization int8 or fp8, or end what else uses the device."
        )

    def text(self) -> str:
        parts = {
            "weights": self.weights,
            "a step's activations": self.activations,
            "CUDA graphs": self.graphs,
            "everything else": self.other,
        }
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())


def profile_cuda_memory(
    runner: "ModelRunner",
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    cuda_graphs: bool,
) -> MemoryProfile | None:
    """Call ``profile_memory`` on the runner's device if that is a CUDA one; return None on other devices."""
    device = runner.ops.device
    if device.type != "cuda":
        return None
    return profile_memory(
        runner,
        CudaMemory(device),
        CudaGraphDevice(device) if cuda_graphs else None,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )


def profile_memory(
    runner: "ModelRunner",
    memory: DeviceMemory,
    graph_device: GraphDevice | None,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> MemoryProfile:
    """Run the largest steps of a loaded runner over a cache of one block, and capture two graphs (None: there
    will be none).

    Leaves the runner without a cache. Raises ConfigError when even that does not fit.
    """
    memory.release()
    weights = memory.allocated()
    with remedy("its largest step", "Lower --max-num-batched-tokens, --max-num-seqs or --max-model-len."):
        # block 1, shared by all, stands for every one
        runner.allocate_cache(KVCachePlan(2, 2, 0, 0, runner.spec.block_size))
        before = memory.allocated()
        memory.reset_peak()
        for step in largest_steps(runner, max_num_batched_tokens, max_num_seqs, max_model_len):
            runner.run(step)
        activations = max(0, memory.peak() - before)
        graphs = 0
        if graph_device is not None:
            graphs = _graph_bytes(runner, memory, graph_device, max_num_seqs, max_model_len)
    runner.release_cache()
    memory.release()
    other = max(0, memory.total() - memory.free() - memory.allocated())
    profile = MemoryProfile(memory.total(), weights, activations, graphs, other)
    logger.info("of %.1f GiB of device memory: %s", profile.total / GIB, profile.text())
    return profile


def largest_steps(
    runner: "ModelRunner", max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> Iterator[StepInput]:
    """Make the steps that take the most memory: as many tokens and sampled rows as may be, at the longest
    length; then decodes alone.

    Where one sequence is too short to fill a step, several are computed in it.
    """
    spec = runner.spec
    token_id = runner.config.bos_token_id
    total = ceil_div(max_model_len, spec.block_size)
    lengths: list[int] = []  # chunks with more than one token
    spare = max_num_batched_tokens - max_num_seqs  # tokens beyond one per sequence
    while spare > 0 and len(lengths) < max_num_seqs and max_model_len > 1:
        lengths.append(min(1 + spare, max_model_len))
        spare -= lengths[-1] - 1
    for chunk_lengths in (lengths, []):
        batch, chunks = RunningBatch(max_num_seqs, total), []
        for num_tokens in (*chunk_lengths, *[1] * (max_num_seqs - len(chunk_lengths))):
            row, start = batch.add([token_id] * num_tokens, num_tokens, _DEAREST), max_model_len - num_tokens
            first = spec.first_local_block(start)
            local_blocks = [NULL_BLOCK] * first + [1] * (total - first)
            batch.set_row_blocks(row, [1] * total, local_blocks)
            chunks.append(SequenceChunk(row, batch.token_ids[row], start, samples=True))
        yield StepInput(batch, prefills=chunks)


def _graph_bytes(
    runner: "ModelRunner", memory: DeviceMemory, device: GraphDevice, max_num_seqs: int, max_model_len: int
) -> int:
    """Estimate the memory of all graphs: the largest, which makes the pool, and for each other one as much as
    the second took."""
    sizes = padded_sizes(max_num_seqs)
    memory.release()
    free = [memory.free()]
    assert runner.cache is not None
    graphs = DecodeGraphs(runner.model, runner.cache, runner.spec, device, sizes, max_model_len)
    for size in sizes[::-1][:2]:
        graphs.capture([size])
        memory.release()
        free.append(memory.free())
    taken = [max(0, before - after) for before, after in pairwise(free)]
    return taken[0] + (len(sizes) - 1) * taken[-1]
