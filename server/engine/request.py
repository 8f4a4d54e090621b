"""A request as the engine sees it: token ids in, token ids out, and the state the scheduler keeps. Imports no
torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from model.interface.grammar_state import Grammar, GrammarState
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NO_TOKEN, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length"]
NO_ROW = -1  # of a request that does not run


class EngineError(Exception):
    """Base of what the engine reports about a request."""


class EngineDeadError(EngineError):
    """The engine has stopped after a fault; no request can be served until the process restarts."""


class EngineDrainingError(EngineError):
    """The engine is shutting down and takes no new requests."""


class RequestFailedError(EngineError):
    """This request alone failed; the engine and all other requests go on."""


class RequestExpiredError(EngineError):
    """The request was still queued at its ``queue_deadline`` and was dropped unstarted."""


class EngineHungError(EngineError):
    """A step did not come back within the step timeout. It cannot be interrupted: the process has to end."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One choice of one prompt, ready to run. ``request_id`` is unique among live requests."""

    request_id: str
    prompt_token_ids: Sequence[int]  # at least one token
    sampling: SamplingParams
    cache_salt: str | None = None  # requests share cached prefixes only under the same salt
    priority: int = 0  # lower is started earlier and preempted later
    grammar: Grammar | None = None  # what the text is constrained to
    # wants the mean of the final hidden states of its prompt, and no tokens: max_tokens is 0
    pooling: bool = False
    # time of the engine's clock after which the request must not be started any more
    queue_deadline: float | None = None


@dataclass(slots=True)
class RequestTimings:
    """Monotonic times in seconds; None where the phase was never reached."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


class TokenOutput(NamedTuple):
    """What one engine step yielded for one request. The last one has ``finish_reason`` set.

    A stop token is included in ``token_ids`` and named in ``stop_token_id``, so that the text can leave it
    out; it counts as a generated token. With max_tokens 0 there is exactly one output, without tokens,
    finish_reason "length".
    """

    token_ids: list[int]
    num_cached_tokens: int
    timings: RequestTimings  # the request's own: they go on changing until it ends
    logprobs: Sequence[TokenLogprobs] = ()  # one per token id, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # first output only; entry i is for prompt token i + 1
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    # [h], of all tokens of the prompt, where the request pools
    mean_hidden: "npt.NDArray[np.float64] | None" = None


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; keeps its tokens, holds no blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """What the engine knows of one request beside its row of the running batch, which it has while it
    runs."""

    spec: EngineRequest
    timings: RequestTimings
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_prompt_tokens: int = field(init=False)
    row: int = NO_ROW
    max_num_tokens: int = 0  # length at which it ends; the scheduler sets it
    # what a step may yield that ends it: stop tokens, and NO_TOKEN for a fault
    stop_token_ids: frozenset[int] = field(init=False)
    num_cached_tokens: int = 0  # prompt tokens of the first admission that came from the prefix cache
    status: RequestStatus = RequestStatus.WAITING
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # [h], of the tokens computed since the last admission
    hidden_sum: "npt.NDArray[np.float64] | None" = None
    has_output: bool = False  # something was already delivered to the client
    admitted: bool = False  # was running at least once
    grammar: GrammarState | None = field(init=False)  # as far as the output is; preemption keeps both

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.stop_token_ids = self.sampling.stop_token_ids | {NO_TOKEN}
        grammar = self.spec.grammar
        self.grammar = None if grammar is None else grammar.new_state(self.sampling.stop_token_ids)

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_hit_tokens(self) -> int:
        """A prefix hit leaves at least one token to compute, and every position of which more than keys and
        values is wanted."""
        if self.spec.pooling:
            return 0
        limit = len(self.token_ids) - 1
        if self.sampling.prompt_logprobs is not None:
            limit = min(limit, len(self.prompt_logprobs))
        return limit
