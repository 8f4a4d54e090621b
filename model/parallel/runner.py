"""ParallelRunner: a ModelRunner whose model is divided among the ranks of a tensor-parallel group. It is rank
0 of them and the only one that anybody else sees: it tells the others each step in one message, samples
alone, and fails a step for which one of them had no memory. The end of a rank ends it.
"""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from model.execution.device_batch import DeviceBatch
from model.execution.runner import resolve_device
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCachePlan
from model.interface.sequence_chunk import StepInput, StepMemoryError, StepResult
from model.network.forward_batch import StepLayout
from model.parallel.group import Group
from model.parallel.layers import ModelShard, check_quantization
from model.parallel.messages import Answer, Call, Connect, Load, Logits, Step
from model.parallel.ranks import Ranks
from model.parallel.shard_runner import ShardRunner
from model.parallel.split import FLAG, divided_config

if TYPE_CHECKING:
    from model.checkpoint.base import Checkpoint

logger = logging.getLogger(__name__)


class ParallelRunner(ShardRunner):
    """The same as ModelRunner to whoever calls it; sizes in bytes are those of one rank."""

    ranks: Ranks
    _free_elsewhere: list[int]
    _unanswered = 0  # messages of the step

    @classmethod
    def load_on(
        cls,
        ranks: Ranks,
        checkpoint: "Checkpoint",
        *,
        device: str = "auto",
        quantization: str = "none",
        num_threads: int | None = None,
        num_valid_tokens: int | None = None,
        group: Group | None = None,
        **arguments: Any,
    ) -> "ParallelRunner":
        """``ModelRunner.load`` on all ranks at once; each reads the files and keeps its share. ``group``: the
        one that the ranks are in already, from an earlier load. Raises ConfigError, CheckpointError and
        RankError."""
        whole = checkpoint.config
        divided_config(whole, ranks.size)  # refuses what cannot be
        target = resolve_device(device)
        if target.type == "cuda" and torch.cuda.device_count() < ranks.size:
            raise ConfigError(
                f"{FLAG} {ranks.size} needs as many CUDA devices, and this machine has "
                f"{torch.cuda.device_count()}. Lower it, or use --device cpu."
            )
        check_quantization(quantization, whole, ranks.size)
        if target.type == "cpu":
            num_threads = num_threads or max(1, torch.get_num_threads() // ranks.size)
        num_valid_tokens = min(whole.vocab_size, num_valid_tokens or whole.vocab_size)
        common: dict[str, Any] = {
            "quantization": quantization,
            "num_threads": num_threads,
            "num_valid_tokens": num_valid_tokens,
        }
        shared = {
            name: value for name, value in arguments.items() if name in ("dtype", "block_size")
        } | common
        joined = _connect(ranks, target.type) if group is None else group
        try:
            ranks.send(Load(checkpoint, num_valid_tokens, shared))
            shard = ModelShard(joined, whole, num_valid_tokens)
            runner = cls.load(checkpoint, device=str(joined.device), shard=shard, **arguments, **common)
            runner.ranks = ranks
            runner.join(joined)
            runner.head.announce = lambda num_rows: runner._tell(Logits(num_rows))
            runner._note(ranks.answers())
        except BaseException:
            if group is None:
                joined.close()
            raise
        logger.info("the model is divided among %d ranks on %s", ranks.size, target.type)
        return runner

    def _note(self, answers: Sequence[Answer]) -> None:
        self._free_elsewhere = [answer.free_memory for answer in answers]

    def free_memory(self) -> int:
        """Bytes that each rank can still take: on a CPU a share of what all have, else what the fullest
        device has left."""
        if self.ops.device.type == "cpu":
            return super().free_memory() // self.group.size
        return min(super().free_memory(), *self._free_elsewhere)

    def allocate_cache(self, plan: KVCachePlan) -> None:
        self.ranks.send(Call("allocate_cache", (plan,)))
        try:
            super().allocate_cache(plan)
        finally:
            self._note(self.ranks.answers())

    def run(self, step: StepInput) -> StepResult:
        """Raises StepMemoryError when any rank had no memory, and RankError when one has ended."""
        try:
            results = super().run(step)
        except StepMemoryError:
            self._finish_step()
            raise
        except Exception as error:
            self._raise_death(error)
            raise
        self._finish_step()
        return results

    def hidden_states(self, step: StepInput) -> torch.Tensor:
        hidden = super().hidden_states(step)
        self._finish_step()
        return hidden

    def _forward(self, layout: StepLayout, on_device: DeviceBatch | None) -> torch.Tensor:
        self._tell(Step(layout))
        return super()._forward(layout, on_device)

    def _tell(self, message: Step | Logits) -> None:
        self.ranks.send(message)
        self._unanswered += 1

    def _finish_step(self) -> None:
        """Let the other ranks end the step, however far this one came. Raises StepMemoryError."""
        try:
            self.group.finish_step()
        except Exception as error:
            self._raise_death(error)
            raise
        reason = None
        while self._unanswered:
            for rank, answer in enumerate(self.ranks.answers(), 1):
                if answer.no_memory is not None:
                    reason = f"rank {rank}: {answer.no_memory}"
            self._unanswered -= 1
        if reason is not None:
            raise StepMemoryError(reason)

    def _raise_death(self, error: Exception) -> None:
        """Raise what an error comes from, where that is the end of a rank."""
        death = self.ranks.explain(error)
        if death is not error:
            raise death from error

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()
        self.group.close()


def _connect(ranks: Ranks, device_type: str) -> Group:
    """All ranks meet over a file in a folder that is this user's alone, and that nobody needs afterwards."""
    with tempfile.TemporaryDirectory(prefix="gemserve-") as folder:
        rendezvous = Path(folder) / "ranks"
        ranks.send(Connect(device_type, rendezvous))
        device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
        group = Group(0, ranks.size, device, rendezvous)
        ranks.answers()  # all have met
    return group
