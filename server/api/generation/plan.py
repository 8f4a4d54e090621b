"""What a request comes to: prompts as tokens, how their choices are drawn, and how their texts are read."""

from collections.abc import Sequence
from dataclasses import dataclass

from model.interface.grammar_state import Grammar
from model.interface.sampling_params import SamplingParams
from server.admission import Ticket
from server.loading.load import LoadedEngine
from server.state import ServerState
from server.text.tool_calls.call_parser import CallFormat


@dataclass(frozen=True, slots=True)
class Intake:
    """A request whose body has been parsed, on its way to a plan: what it is planned with."""

    state: ServerState
    loaded: LoadedEngine
    response_id: str
    ticket: Ticket

    @property
    def max_model_len(self) -> int:
        return self.loaded.engine.limits.max_model_len


@dataclass(frozen=True, slots=True)
class AnswerTerms:
    """What is asked of the answers, which each endpoint has fields of its own for."""

    prompt_field: str  # that errors about the prompt name
    max_tokens: int | None
    default_max_tokens: int | None = None  # None: what the context leaves room for
    n: int = 1
    num_best: int | None = None  # of the n choices of each prompt, so many are returned: the likeliest
    stop: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    shows_timings: bool = False


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt, and how its choices are drawn. ``text`` is its text as echo shows it."""

    token_ids: list[int]
    sampling: SamplingParams
    text: str


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    response_id: str
    prompts: tuple[PromptPlan, ...]
    n: int
    stop: tuple[str, ...]
    cache_salt: str | None = None
    include_stop: bool = False  # the text ends with the stop string or stop token
    skip_special_tokens: bool = True
    num_best: int | None = None  # of the n choices of each prompt, so many are returned: the likeliest
    grammar: Grammar | None = None
    calls: CallFormat | None = None  # of functions, where the text may have any
    priority: int = 0  # lower is earlier
    shows_timings: bool = False
    pooling: bool = False  # what is wanted of each prompt is the mean of its hidden states

    @property
    def shows_labels(self) -> bool:
        """Generated tokens come with the request's own choice of alternatives, all of which are shown."""
        return self.prompts[0].sampling.logprob_token_ids is not None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_sequences(self) -> int:
        """Requests in the engine: equal choices are computed once."""
        return sum(1 if prompt.sampling.greedy else self.n for prompt in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)
