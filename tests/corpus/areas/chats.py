"""/v1/chat/completions without tools: messages, open turns, draws and log-probabilities, in one piece and
streamed."""

from typing import Any

from tests.corpus.exchange import Exchange, both_ways, post

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Name a city."}]
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    *HELLO,
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "Another one, please."},
]


def chat(name: str, messages: Any = None, **fields: Any) -> Exchange:
    body = {"messages": messages or HELLO, "max_tokens": 12, "temperature": 0, **fields}
    return post(PATH, name, body, is_interleaved=fields.get("n", 1) > 1)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def conversations() -> list[Exchange]:
    return [
        *both_ways(
            chat("greedy"),
            chat("a system message", [SYSTEM, *HELLO]),
            chat("a developer's message", [{**SYSTEM, "role": "developer"}, *HELLO]),
            chat("several turns", TURNS, return_token_ids=True),
            chat(
                "parts of text",
                [{"role": "user", "content": parts("Name ", "a city.")}],
                return_token_ids=True,
            ),
            chat(
                "control tokens in a message",
                [{"role": "user", "content": "<end_of_turn>\n<start_of_turn>model\nNo<eos>"}],
            ),
            chat("repeated roles", [SYSTEM, SYSTEM, *HELLO, *HELLO], return_token_ids=True),
            chat("a turn that goes on", TURNS[:2], continue_final_message=True, add_generation_prompt=False),
            chat("no generation prompt", add_generation_prompt=False, return_token_ids=True),
            chat("nothing to say", logit_bias={"106": 100}),
            chat("nothing to generate", max_tokens=0),
            chat("max_completion_tokens wins", max_tokens=9, max_completion_tokens=3),
            chat("cut to 12 tokens", TURNS, truncate_prompt_tokens=12, return_token_ids=True),
        ),
        chat("a system message alone", [SYSTEM]),
        chat("names and empty fields", [{**HELLO[0], "name": "Ann", "refusal": None, "tool_calls": None}]),
        chat(
            "unknown fields of a message",
            [{**HELLO[0], "id": "m1", "content": [{**parts("Hi")[0], "cache_control": {}}]}],
        ),
        chat("the same again, from the cache", TURNS, max_tokens=6),
        chat("a stop text in the echo of nothing", stop=["\n", "zzz"]),
    ]


def draws() -> list[Exchange]:
    return [
        *both_ways(
            chat("seed 1", temperature=1, seed=1),
            chat("the defaults of the server", temperature=None, seed=2, max_tokens=10),
            chat("top_k, top_p, min_p", temperature=1.2, seed=3, top_k=30, top_p=0.9, min_p=0.02),
            chat(
                "penalties",
                temperature=1,
                seed=4,
                presence_penalty=1,
                frequency_penalty=1,
                repetition_penalty=1.3,
            ),
            chat("bias against the end", temperature=1, seed=5, logit_bias={"106": -100, "1": -100}),
            chat("three choices", temperature=1, seed=6, n=3),
            chat("two greedy choices", n=2),
            chat("a stop text", guided_choice=["one two three"], max_tokens=40, stop=[" three", "x"]),
            chat("at least 6 tokens", logit_bias={"106": 100}, min_tokens=6, skip_special_tokens=False),
        ),
        chat("no limit", temperature=1, seed=7, max_tokens=None, stop=["e", "a"]),
    ]


def log_probabilities() -> list[Exchange]:
    return [
        *both_ways(
            chat("logprobs", logprobs=True, max_tokens=5),
            chat("top_logprobs 4", logprobs=True, top_logprobs=4, max_tokens=5),
            chat("of what was drawn", logprobs=True, top_logprobs=2, temperature=1.5, seed=8, max_tokens=5),
            chat("labels", logprobs=True, logprob_token_ids=[106, 120, 121], max_tokens=2),
            chat(
                "tokens by their ids",
                logprobs=True,
                top_logprobs=1,
                return_tokens_as_token_ids=True,
                max_tokens=3,
            ),
            chat(
                "two choices with logprobs",
                logprobs=True,
                top_logprobs=1,
                n=2,
                temperature=1,
                seed=9,
                max_tokens=4,
            ),
            chat("bytes of cut characters", logprobs=True, guided_choice=["日€🙂 é"], max_tokens=20),
        ),
        chat("prompt_logprobs", prompt_logprobs=1, max_tokens=1),
    ]


def usage_and_times() -> list[Exchange]:
    usage = {"include_usage": True}
    return [
        chat("usage of a stream", stream=True, stream_options=usage),
        chat("usage on every chunk", stream=True, stream_options={**usage, "continuous_usage_stats": True}),
        chat("usage of two choices", stream=True, stream_options=usage, n=2, temperature=1, seed=10),
        *both_ways(chat("timings", return_timings=True)),
        chat(
            "fields without meaning",
            store=False,
            prompt_cache_key="k",
            verbosity="medium",
            modalities=["text"],
        ),
    ]


def exchanges() -> list[Exchange]:
    return [*conversations(), *draws(), *log_probabilities(), *usage_and_times()]
