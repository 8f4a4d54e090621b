"""What the bodies of the generation endpoints share. Types are strict (true is no integer, "5" and
2.0 are no integers, no NaN), every number is bounded, and an explicit null means the default. What a request
means is decided in ``planning`` and in the plans of the endpoints, not here.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.structured_schemas import (
    ChoiceList,
    Pattern,
    ResponseFormat,
    SchemaField,
    StructuredOutputs,
)
from server.api.generation.wire_values import JsonObject, WireModel, check_text, wrong_type
from server.http.deadline import MAX_TIMEOUT_SECONDS, MIN_TIMEOUT_SECONDS

MAX_INT = 2**63 - 1
MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BEST_OF = 20
MAX_PROMPTS = 1024


def check_prompts(value: object, limit: int) -> object:
    """Sniffs nothing: the first element decides the form, and every other one must have it. Ids are checked
    against the vocabulary later. A plain union of lists would take [true, 2.0, "5"] for ids and report every
    element of a long list."""
    expected = "expected a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list):
        raise wrong_type(expected)
    if not value:
        raise PydanticCustomError("empty_array", "expected at least one prompt, got an empty list")
    first = value[0]
    if isinstance(first, str):
        if not all(isinstance(item, str) for item in value):
            raise wrong_type(expected + "; the list mixes them")
        for item in value:
            check_text(item)
    elif isinstance(first, list):
        if not all(isinstance(item, list) for item in value):
            raise wrong_type(expected + "; the list mixes them")
        if not all(value):
            raise PydanticCustomError(
                "empty_array", "expected at least one token id in each prompt, got an empty list"
            )
        if not all(type(token) is int for item in value for token in item):
            raise wrong_type(expected + "; token ids are integers")
    elif not all(type(token) is int for token in value):
        raise wrong_type(expected + "; token ids are integers")
    num_prompts = 1 if type(first) is int else len(value)
    if num_prompts > limit:
        raise PydanticCustomError(
            "array_above_max_length",
            "expected at most {limit} prompts, got {count}",
            {"limit": limit, "count": num_prompts},
        )
    return value


def _check_prompt(value: object) -> object:
    return check_prompts(value, MAX_PROMPTS)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_logit_bias(value: dict[str, float]) -> dict[str, float]:
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise PydanticCustomError(
            "object_above_max_properties",
            "expected at most {limit} entries, got {count}",
            {"limit": MAX_LOGIT_BIAS_ENTRIES, "count": len(value)},
        )
    for key in value:
        if not (key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0") and len(key) <= 9):
            raise PydanticCustomError(
                "invalid_value", "expected token ids as keys, got {key}", {"key": repr(key[:20])}
            )
    return value


def _check_truncation(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("integer_below_min_value", "expected -1 or at least 1")
    return value


Text = Annotated[str, AfterValidator(check_text)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
StopList = Annotated[
    list[StopString],
    BeforeValidator(_listed),
    Field(
        max_length=MAX_STOP_STRINGS,
        description=f"A string, or up to {MAX_STOP_STRINGS} strings, that end the text.",
    ),
    WithJsonSchema(
        {"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS}]}
    ),
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Field(ge=0, le=MAX_INT)]
Truncation = Annotated[
    int,
    Field(ge=-1, le=MAX_INT),
    AfterValidator(_check_truncation),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]}),
]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]],
    AfterValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
        }
    ),
]


def prompt_schema(limit: int, min_length: int = 0) -> WithJsonSchema:
    """Up to ``limit`` prompts, texts of at least so many characters."""
    text = {"type": "string", "minLength": min_length}
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    lists = [{"type": "array", "items": item, "minItems": 1, "maxItems": limit} for item in (text, ids)]
    return WithJsonSchema({"anyOf": [text, ids, *lists]})


PromptField = Annotated[Any, BeforeValidator(_check_prompt), prompt_schema(MAX_PROMPTS)]


class StreamOptions(WireModel):
    include_usage: bool | None = Field(
        None, description="Send one more chunk with the usage of the whole request."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far on every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class GenerationBody(WireModel):
    """What the bodies of all endpoints that compute have."""

    model: str | None = Field(None, max_length=512, description="A served name; the first one when absent.")
    stream: bool | None = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS)] | None = Field(
        None,
        description="Seconds within which the whole answer must be there; also the header X-Request-Timeout.",
    )
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = Field(
        None, description="Lower is earlier; anything but 0 needs --scheduling-policy priority."
    )


class GenerationRequest(GenerationBody):
    """What the endpoints of OpenAI's forms share. Fields without meaning here are accepted and named in a
    response header."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = Field(None, description="0 or -1: off.")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    min_tokens: TokenCount | None = Field(
        None, description="End tokens and stop strings wait for this many tokens."
    )
    stop: StopList | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = Field(None, description="On generated tokens.")
    frequency_penalty: Penalty | None = Field(None, description="On generated tokens.")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = Field(
        None, description="On tokens of the prompt and generated ones; 1: off."
    )
    logit_bias: LogitBias | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = Field(None, description="Nothing else is drawn, end tokens included.")
    include_stop_str_in_output: bool | None = Field(
        None, description="The text ends with the stop string or stop token."
    )
    skip_special_tokens: bool | None = Field(
        None, description="False: control tokens are shown as their literals. Default true."
    )
    truncate_prompt_tokens: Truncation | None = Field(
        None,
        description="Keep this many tokens at the prompt's end (-1: what fits), "
        "and a beginning-of-sequence token in front.",
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField | None = None
    guided_regex: Pattern | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: Pattern | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(check_text)] | None = (
        Field(None, description="Cached prefixes are shared between requests of the same salt only.")
    )
    user: Annotated[str, Field(max_length=512)] | None = None
    # Known to OpenAI's API and without meaning here.
    store: bool | None = None
    metadata: Annotated[JsonObject, Field(max_length=64)] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChoicesRequest(GenerationRequest):
    """What completions and chats share: answers of several choices."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenCount | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = Field(
        None,
        description="With logprobs: the alternatives reported at each generated position, "
        "instead of the likeliest.",
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Log-probabilities of the prompt's tokens, with so many alternatives. Not with stream.",
    )
    return_token_ids: bool | None = Field(
        None, description="Adds prompt_token_ids and token_ids to the answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens of logprobs are called token_id:N."
    )
    return_timings: bool | None = Field(
        None, description="Adds timings to the answer, or to the last chunk of its choices."
    )


# Accepted without effect: the answer names them in the header x-gemserve-ignored-parameters.
FIELDS_WITHOUT_MEANING = frozenset(
    {
        "store",
        "max_tool_calls",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
