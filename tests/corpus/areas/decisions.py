"""/v1/decisions: typed questions about one input. A question is asked alone before it is asked beside others:
which of several new questions finds the common beginning computed depends on when each of them came to the
engine."""

from typing import Any

from tests.corpus.exchange import Exchange, post

PATH = "/v1/decisions"
INPUT = "Charged twice for one month."
PREDICATE = {"type": "predicate", "name": "refund", "instructions": "The customer wants money back."}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing"}, {"value": True, "description": "a yes"}, {"value": "true"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "urgency",
    "instructions": "How urgent?",
    "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high", "description": "now"}],
}
ITEMS = [
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Look:"}, {"type": "input_json", "data": [{"a": 1}]}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "done"},
]


def decide(name: str, *questions: Any, **fields: Any) -> Exchange:
    return post(PATH, name, {"input": INPUT, "questions": list(questions), **fields})


def exchanges() -> list[Exchange]:
    parts = [{"type": "input_text", "text": "It is about"}, {"type": "input_json", "data": {"money": "back"}}]
    many = {
        **CHOICE,
        "instructions": "Which number?",
        "choices": [{"value": f"v{number}"} for number in range(26)],
    }
    return [
        decide("a predicate", PREDICATE),
        decide("a choice", CHOICE),
        decide("a score", SCORE),
        decide("all three", PREDICATE, CHOICE, SCORE),
        decide("a question twice", SCORE, PREDICATE, SCORE),
        decide("26 choices", many),
        decide("a conversation", PREDICATE, input=ITEMS),
        decide("instructions of parts", {**PREDICATE, "instructions": parts, "name": None}),
        decide("fields without meaning", PREDICATE, prompt_cache_key="k", safety_identifier="s", moon=1),
    ]


REFUSED: dict[str, dict[str, Any]] = {
    "no questions": {"questions": None},
    "an empty list": {"questions": []},
    "401 questions": {"questions": [PREDICATE] * 401},
    "an unknown type": {"questions": [{**PREDICATE, "type": "essay"}]},
    "no instructions": {"questions": [{"type": "predicate"}]},
    "empty instructions": {"questions": [{**PREDICATE, "instructions": ""}]},
    "an image": {"questions": [{**PREDICATE, "instructions": [{"type": "input_image"}]}]},
    "choices of a predicate": {"questions": [{**PREDICATE, "choices": CHOICE["choices"]}]},
    "levels of a choice": {"questions": [PREDICATE, {**SCORE, "type": "choice"}]},
    "one level": {"questions": [{**SCORE, "levels": SCORE["levels"][:1]}]},
    "the same value twice": {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
    "a number as a value": {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": 1}]}]},
    "more choices than labels": {
        "questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(255)]}]
    },
    "no input": {"input": None},
    "data that is no object": {"input": [{"role": "user", "content": [{"type": "input_json", "data": [1]}]}]},
    "too long an input for so many": {"input": "a" * 50_000, "questions": [PREDICATE] * 400},
    "a long input": {"input": "word " * 3000},
    "a stream": {"stream": True},
    "another model": {"model": "other"},
}


def refused() -> list[Exchange]:
    return [decide(name, PREDICATE, **fields) for name, fields in REFUSED.items()]
