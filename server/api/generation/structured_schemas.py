"""The fields of a body that constrain the text, as clients of OpenAI and of vLLM spell them."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.generation.wire_values import WireModel, check_text, wrong_type
from server.grammar.source import MAX_LISTED_CHOICES


def _check_schema(value: object) -> object:
    """A JSON schema: an object, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise PydanticCustomError(
                "invalid_value", "the text is not valid JSON: {error}", {"error": str(error)[:100]}
            ) from None
    if not isinstance(value, dict):
        raise wrong_type("expected a JSON schema as an object, or as the text of one")
    return value


SchemaField = Annotated[
    Any,
    BeforeValidator(_check_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(check_text)]
ChoiceList = Annotated[list[Pattern], Field(min_length=1, max_length=MAX_LISTED_CHOICES)]


class JsonSchemaFormat(WireModel):
    name: Annotated[str, Field(max_length=512)] | None = None
    description: str | None = Field(None, description="Accepted; the model does not see it.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The schema is enforced either way.")


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(WireModel):
    json_: SchemaField | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: ChoiceList | None = None
    grammar: Pattern | None = None
    disable_any_whitespace: bool | None = Field(None, description="Accepted; JSON is compact either way.")
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None
