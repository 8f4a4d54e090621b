"""Parameters that OpenAI's API or its common extensions know and this server does not support: refused by
name, unless the value is the one that means "off". Nothing a client could rely on is ignored."""

import json
from collections.abc import Container, Mapping
from typing import Any

from server.errors import unsupported_parameter

_OFF: tuple[Any, ...] = (None, False)

# The parameter, and the values that mean "off". A name that an endpoint has a field for is not looked up for
# it.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),  # of chats
    "add_special_tokens": (None, True),
    "audio": (None,),
    "background": _OFF,
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "context_management": (None, []),
    "continue_final_message": _OFF,  # of chats
    "conversation": (None,),
    "documents": (None, []),
    "early_stopping": _OFF,
    "echo": _OFF,
    "function_call": (None, "none"),
    "functions": (None,),
    "grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True, False),
    "input": (None,),
    "instructions": (None, ""),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "logprobs": _OFF,
    "lora": (None,),
    "max_completion_tokens": (None,),
    "max_output_tokens": (None,),
    "max_tokens": (None,),
    "messages": (None,),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "n": (None, 1),
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning": (None, {}, {"effort": "none"}),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "return_token_ids": _OFF,
    "return_timings": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "thinking": (None,),
    "tool_choice": (None, "none"),
    "tools": (None,),
    "top_logprobs": (None,),
    "typical_p": (None, 1),
    "use_beam_search": _OFF,
    "verbosity": (None, "medium"),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}

# Why, where the name alone leaves a client without a way on.
_REASONS: Mapping[str, str] = {
    "background": "Nothing is stored: the answer is there when the request ends.",
    "conversation": "Nothing is stored: send the earlier items in 'input'.",
    "function_call": "Use 'tool_choice' with 'tools'.",
    "functions": "Use 'tools'.",
    "input": "It belongs to /v1/responses.",
    "max_output_tokens": "It belongs to /v1/responses: use 'max_completion_tokens' or 'max_tokens'.",
    "max_tokens": "Use 'max_output_tokens'.",
    "previous_response_id": "Nothing is stored: send the earlier items in 'input'.",
    "response_format": "Use 'text.format'.",
    "suffix": "The model continues text and was not trained to fill in the middle: put what comes before the "
    "gap into 'prompt'.",
}


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python; on the wire they differ.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def remove_unsupported(body: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
    """The body without the parameters that are set to "off". Raises ApiError for the first one that is
    not."""
    rest = {}
    for name, value in body.items():
        if name in fields or name not in UNSUPPORTED:
            rest[name] = value
        elif not any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
            off = [json.dumps(neutral) for neutral in UNSUPPORTED[name] if neutral is not None]
            reason = f"{_REASONS[name]} " if name in _REASONS else ""
            raise unsupported_parameter(
                name, f"{reason}Leave it out{f' or set it to {off[0]}' if off else ''}."
            )
    return rest
