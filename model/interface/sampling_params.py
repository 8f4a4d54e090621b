"""How one request wants its tokens drawn: plain values, validated on the wire, read by scheduler and sampler.
No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one choice of one request.

    Random draws depend on (seed, choice, position) only, so a choice never depends on the batch it runs in.
    Log-probabilities are those of the raw distribution, before temperature, penalties, bias and truncation.
    """

    max_tokens: int  # >= 0; 0 computes the prompt only (scoring)
    temperature: float = 1.0  # <= 1e-5 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # the server draws one when the client gives none
    choice: int = 0
    presence_penalty: float = 0.0  # generated tokens only
    frequency_penalty: float = 0.0  # generated tokens only
    repetition_penalty: float = 1.0  # prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    # every id that ends the request, end-of-sequence ids included
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # stop_token_ids are masked until this many tokens are generated
    # alternatives beside the sampled token; 0: the sampled token alone; None: off
    logprobs: int | None = None
    # With logprobs: these tokens are reported beside the sampled one, in this order, instead of the
    # likeliest.
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None  # like ``logprobs`` for the prompt's tokens, always with the likeliest

    @property
    def greedy(self) -> bool:
        return self.temperature <= 1e-5 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Whether the token is drawn from the unedited logits and only the token itself is returned."""
        edited = (
            self.penalised
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or self.min_tokens > 0
        )
        return not edited and self.logprobs is None

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
