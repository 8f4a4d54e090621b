"""What scoring must find, computed in this process from plain logits: reference operations in float32, one
text at a time, with the tokenizer's own library. Nothing of it is shared with the way of a request through
the server."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from model.checkpoint.open import open_checkpoint
from model.execution.runner import ModelRunner
from model.interface.kv_cache_spec import KVCachePlan, KVCacheSpec
from model.interface.sequence_chunk import StepInput
from model.network.gemma3 import Gemma3
from model.ops.reference import ReferenceOps

MAX_TOKENS = 256  # of one text
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Score:
    """Of one continuation. ``margin``: by how much its tokens' logits are above those of all others, the
    least of them."""

    logprob: float
    margin: float


class Reference:
    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer) -> None:
        """The runner has a cache of MAX_TOKENS."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._num_tokens = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, model: str | None) -> "Reference":
        checkpoint = open_checkpoint(model)
        ops = ReferenceOps(torch.device("cpu"), torch.float32)
        with torch.inference_mode():
            network = Gemma3(checkpoint.config, ops, checkpoint.config.vocab_size)
            network.load_weights(checkpoint.tensors())
        spec = checkpoint.config.kv_cache_spec(BLOCK_SIZE, 4)
        runner = ModelRunner(network, spec, ops)
        runner.allocate_cache(cache_plan(spec))
        reference = cls(runner, Tokenizer.from_file(str(checkpoint.tokenizer_file)))
        checkpoint.close()
        return reference

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def score(self, context: str, continuation: str) -> Score:
        """The tokens of the continuation are those of both together after as many as the context has."""
        token_ids = self.encode(context + continuation)
        first = len(self.encode(context))
        assert 0 < first < len(token_ids) <= MAX_TOKENS
        table = list(range(1, MAX_TOKENS // BLOCK_SIZE + 1))
        step = StepInput.of_prompt(token_ids, table)
        hidden = self._runner.hidden_states(step)[first - 1 : -1]
        logits = self._runner.model.logits(hidden)[:, : self._num_tokens].double()
        targets = torch.tensor(token_ids[first:])[:, None]
        chosen = logits.gather(1, targets)
        others = logits.scatter(1, targets, -torch.inf).amax(dim=-1, keepdim=True)
        return Score(
            float(logits.log_softmax(dim=-1).gather(1, targets).sum()), float((chosen - others).min())
        )


def cache_plan(spec: KVCacheSpec) -> KVCachePlan:
    num_blocks = MAX_TOKENS // BLOCK_SIZE + 1
    return KVCachePlan(
        num_global_blocks=num_blocks,
        num_local_blocks=num_blocks,
        global_bytes=num_blocks * spec.global_block_bytes,
        local_bytes=num_blocks * spec.local_block_bytes,
        capacity_tokens=MAX_TOKENS,
    )
