"""The step that is being put together: which requests, and how many tokens of each. Imports no torch."""

from dataclasses import dataclass, field

from model.interface.running_batch import RunningBatch
from model.interface.sequence_chunk import SequenceChunk
from server.engine.request import Request


@dataclass(slots=True)
class ScheduledChunk:
    """``num_tokens`` tokens of one request, from its first uncomputed one."""

    request: Request
    num_tokens: int

    def sequence_chunk(self, batch: RunningBatch) -> SequenceChunk:
        request = self.request
        start = int(batch.num_computed_tokens[request.row])
        stop = start + self.num_tokens
        wants_prompt = request.sampling.prompt_logprobs is not None
        return SequenceChunk(
            row=request.row,
            token_ids=request.token_ids[start:stop],
            start=start,
            samples=stop == request.num_tokens and request.sampling.max_tokens > 0,
            prompt_targets=request.token_ids[start + 1 : min(stop + 1, request.num_prompt_tokens)]
            if wants_prompt
            else (),
            pooling=request.spec.pooling,
        )


@dataclass(slots=True)
class ScheduledStep:
    """``decodes`` are requests that run the token sampled last, and nothing else; ``prefills`` all others."""

    decodes: list[Request] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.prefills)

    def drop(self, request: Request) -> None:
        self.decodes = [other for other in self.decodes if other is not request]
        self.prefills = [chunk for chunk in self.prefills if chunk.request is not request]
