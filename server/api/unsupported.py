"""Parameters that OpenAI's API or its common extensions know and this server does not support: refused by name, unless the value
is the one that means "off". Nothing a client could rely on is ignored."""

import json
from collections.abc import Container, Mapping
from typing import Any

from server.errors import unsupported_parameter

_OFF: tuple[Any, ...] = (None, False)

# The parameter, and the values that mean "off". A name that an endpoint has a field for is not looked up for it.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),  # of chats
    "add_special_tokens": (None, True),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": _OFF,  # of chats
    "documents": (None, []),
    "early_stopping": _OFF,
    "echo": _OFF,
    "function_call": (None, "none"),
    "functions": (None,),
    "grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True, False),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "lora": (None,),
    "max_completion_tokens": (None,),
    "messages": (None,),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "prompt": (None,),
    "prompt_embeds": (None,),
    "reasoning": (None,),
    "reasoning_effort": (None, "none"),
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
    "suffix": "The model continues text and was not trained to fill in the middle: put what comes before the gap into 'prompt'.",
}


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python; on the wire they differ.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def remove_unsupported(body: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
    """The body without the parameters that are set to "off". Raises ApiError for the first one that is not."""
    rest = {}
    for name, value in body.items():
        if name in fields or name not in UNSUPPORTED:
            rest[name] = value
        elif not any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
            off = [json.dumps(neutral) for neutral in UNSUPPORTED[name] if neutral is not None]
            reason = f"{_REASONS[name]} " if name in _REASONS else ""
            raise unsupported_parameter(name, f"{reason}Leave it out{f' or set it to {off[0]}' if off else ''}.")
    return rest
