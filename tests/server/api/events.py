"""What the unit tests of endpoints share: plans, events of a run and heads of answers, made by hand."""

from collections.abc import Sequence
from typing import Any

from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import TokenLogprobs
from server.api.generation.plan import GenerationPlan, PromptPlan
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.wire_values import ResponseHead
from server.text.tool_calls.call_parser import Part

HEAD = ResponseHead("id-1", 1_700_000_000, "tiny", "fp")


def plan(num_prompts: int = 1, n: int = 1, **fields: Any) -> GenerationPlan:
    sampling = SamplingParams(max_tokens=8, temperature=1.0)
    prompts = tuple(PromptPlan([2, 40 + index], sampling, f"prompt {index}") for index in range(num_prompts))
    return GenerationPlan("id-1", prompts, n, (), **fields)


def event(
    *parts: Part,
    index: int = 0,
    tokens: Sequence[int] = (),
    logprobs: Sequence[TokenLogprobs] = (),
    first: bool = False,
    finish: Any = None,
    stop_text: str | None = None,
) -> ChoiceEvent:
    return ChoiceEvent(index, parts, tokens, logprobs, None, first, finish, stop_text)


def usage(prompt: int = 3, completion: int = 2, cached: int = 1, is_over: bool = True) -> Usage:
    return Usage(prompt, completion, cached, is_over=is_over)
