"""Twenty schemas of the kinds that applications send, each with what the model is asked to write. Texts are
short, so that most documents come to an end; some schemas leave length open, and their documents may be
cut."""

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


def record(properties: Schema, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def text(length: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": length}


def number(kind: str, least: float, most: float) -> Schema:
    return {"type": kind, "minimum": least, "maximum": most}


def reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def either(*branches: Schema) -> Schema:
    return {"anyOf": list(branches)}


NULL: Schema = {"type": "null"}
ADDRESS = record(
    {"street": text(20), "city": text(12), "zip": {"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}}
)
TREE = record({"name": text(6), "children": {"type": "array", "items": reference("tree"), "maxItems": 2}})
LIST = record({"value": number("integer", 0, 9), "next": either(reference("cell"), NULL)})
EXPRESSION = either(
    number("integer", -99, 99),
    record(
        {"op": {"enum": ["+", "-", "*"]}, "left": reference("expression"), "right": reference("expression")}
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One schema and what a document of it is about."""

    subject: str
    schema: Schema


CASES: dict[str, Case] = {
    "nested": Case("a customer", record({"name": text(16), "address": ADDRESS})),
    "deeply nested": Case(
        "a country",
        record(
            {
                "country": record(
                    {"region": record({"city": record({"name": text(12), "big": {"type": "boolean"}})})}
                )
            }
        ),
    ),
    "enums": Case(
        "a T-shirt",
        record(
            {
                "size": {"enum": ["S", "M", "L", "XL"]},
                "color": {"enum": ["red", "dark blue", "grün"]},
                "rating": {"enum": [1, 2.5, None, True]},
            }
        ),
    ),
    "array of numbers": Case(
        "winning numbers", {"type": "array", "items": number("integer", 1, 49), "minItems": 6, "maxItems": 6}
    ),
    "array of records": Case(
        "an order",
        record(
            {
                "items": {
                    "type": "array",
                    "items": record(
                        {
                            "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{3}$"},
                            "count": number("integer", 1, 20),
                        }
                    ),
                    "minItems": 1,
                    "maxItems": 3,
                }
            }
        ),
    ),
    "tuple": Case(
        "a place on a map",
        {
            "type": "array",
            "prefixItems": [text(10), number("number", -90, 90), number("number", -180, 180)],
            "items": False,
            "minItems": 3,
        },
    ),
    "union of records": Case(
        "a shape",
        either(
            record({"kind": {"const": "circle"}, "radius": number("integer", 1, 500)}),
            record(
                {
                    "kind": {"const": "box"},
                    "width": number("integer", 1, 500),
                    "height": number("integer", 1, 500),
                }
            ),
            record({"kind": {"const": "text"}, "text": text(12)}),
        ),
    ),
    "union of types": Case(
        "a setting",
        record({"key": text(10), "value": either(text(10), {"type": "integer"}, {"type": "boolean"}, NULL)}),
    ),
    "exclusive union": Case(
        "a payment",
        {
            "oneOf": [
                record({"card": {"type": "string", "pattern": "^[0-9]{4}$"}}),
                record({"iban": {"type": "string", "pattern": "^DE[0-9]{6}$"}}),
            ]
        },
    ),
    "list of types": Case(
        "a sensor",
        record(
            {
                "id": {"type": ["string", "integer"], "maxLength": 8, "minimum": 0},
                "value": {"type": ["number", "null"]},
            }
        ),
    ),
    "recursive tree": Case("a family tree", {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}),
    "recursive list": Case("a linked list", {"$ref": "#/$defs/cell", "$defs": {"cell": LIST}}),
    "recursive union": Case("a sum", {"$ref": "#/$defs/expression", "$defs": {"expression": EXPRESSION}}),
    "patterns": Case(
        "a software release",
        record(
            {
                "version": {"type": "string", "pattern": r"^v[0-9]{1,2}\.[0-9]{1,2}(\.[0-9]+)?$"},
                "commit": {"type": "string", "pattern": "^[0-9a-f]{7}$"},
                "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})?$"},
            }
        ),
    ),
    "formats": Case(
        "an appointment",
        record(
            {
                "day": {"type": "string", "format": "date"},
                "at": {"type": "string", "format": "time"},
                "created": {"type": "string", "format": "date-time"},
            }
        ),
    ),
    "addresses of machines": Case(
        "a server",
        record(
            {
                "id": {"type": "string", "format": "uuid"},
                "ip": either({"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}),
                "host": {"type": "string", "format": "hostname"},
            }
        ),
    ),
    "bounds": Case(
        "the weather",
        record(
            {
                "celsius": number("number", -40.5, 50),
                "humidity": number("integer", 0, 100),
                "rain": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "step": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 200},
            }
        ),
    ),
    "optional properties": Case(
        "a contact",
        record(
            {
                "name": text(16),
                "nickname": text(8),
                "age": number("integer", 0, 120),
                "email": {"type": "string", "format": "email", "maxLength": 24},
                "friend": {"type": "boolean"},
            },
            optional=("nickname", "age", "email", "friend"),
        ),
    ),
    "other properties": Case(
        "ages of some people",
        {
            "type": "object",
            "properties": {"source": {"const": "survey"}},
            "required": ["source"],
            "additionalProperties": number("integer", 0, 120),
        },
    ),
    "all of": Case(
        "a book",
        {
            "$defs": {"titled": {"type": "object", "properties": {"title": text(24)}, "required": ["title"]}},
            "allOf": [
                reference("titled"),
                {
                    "type": "object",
                    "properties": {"year": number("integer", 1450, 2030), "title": {"type": "string"}},
                    "required": ["year"],
                },
            ],
        },
    ),
}
