"""The capacity of one replica on paper, from a profile: steps that are full of decoding sequences, and the
prefills that keep them full. An upper bound: no queue is ever empty, no request waits for a cache block."""

from dataclasses import dataclass

from deploy.scaling.timing import Profile, keys_read

HOUR = 3600


@dataclass(frozen=True, slots=True)
class Capacity:
    """``sequences``: running at once. Rates are per second, at the steady state."""

    prompt_tokens: int
    output_tokens: int
    sequences: int
    sequences_in_cache: int
    token_seconds: float  # between two tokens of a stream
    requests_per_second: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.requests_per_second * self.output_tokens

    @property
    def all_tokens_per_second(self) -> float:
        return self.requests_per_second * (self.prompt_tokens + self.output_tokens)

    def cost_per_million(self, cost_per_hour: float) -> float:
        """Of output tokens, their prompts included."""
        return cost_per_hour / HOUR / self.output_tokens_per_second * 1e6


def capacity(profile: Profile, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> Capacity:
    """Of requests that are all alike, ``cached_tokens`` of whose prompts are in the prefix cache.

    In the time of one request's decoding every sequence has had its prefill too. With n sequences, a decode
    step of D(n) seconds and a prefill of P seconds for one prompt, n requests take output_tokens x D(n) + n x
    P seconds, so that requests/s = n / (output_tokens x D(n) + n x P).
    """
    timing, spec = profile.timing, profile.spec
    length = prompt_tokens + output_tokens
    in_cache = profile.capacity_tokens // (spec.blocks(length - 1, 1).global_blocks * spec.block_size)
    sequences = max(1, min(profile.max_num_seqs, in_cache))
    middle = prompt_tokens + output_tokens // 2
    decode = timing.network.at(sequences) + timing.head.at(sequences)
    decode += timing.key_read * sequences * keys_read(middle, 1, spec)
    prefill, start = 0.0, cached_tokens
    while start < prompt_tokens:
        count = min(profile.max_num_batched_tokens, prompt_tokens - start)
        prefill += timing.network.at(count) + timing.key_read * keys_read(start, count, spec)
        start += count
    seconds = output_tokens * decode + sequences * prefill
    return Capacity(
        prompt_tokens, output_tokens, sequences, in_cache, seconds / output_tokens, sequences / seconds
    )
