"""/v1/completions: prompts, lengths, ends, draws and log-probabilities, in one piece and streamed."""

from typing import Any

from tests.corpus.exchange import Exchange, both_ways, post

PATH = "/v1/completions"
PROMPT = "The city of light is"
IDS = [2, 120, 150, 180, 210, 240, 260]  # a BOS, and tokens that every vocabulary has
LONG = "It is a long way to the city, and the way is long. " * 6


def complete(name: str, prompt: Any = PROMPT, **fields: Any) -> Exchange:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    has_several_prompts = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return post(PATH, name, body, is_interleaved=has_several_prompts or fields.get("n", 1) > 1)


def drawn(name: str, seed: int, **fields: Any) -> Exchange:
    return complete(name, **{"temperature": 1, "seed": seed, **fields})


def prompts() -> list[Exchange]:
    return [
        *both_ways(
            complete("greedy text"),
            complete("token ids", IDS),
            complete(
                "text with control tokens",
                "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
            ),
            complete("other alphabets", "日本 é 🙂 \u0000\u2028"),
            complete("several texts", ["One", "Two words", ""]),
            complete(
                "several lists of ids, two choices each", [IDS[:3], IDS[:5]], n=2, temperature=1, seed=4
            ),
            complete("a long prompt", LONG),
            complete("cut to 9 tokens", LONG, truncate_prompt_tokens=9, return_token_ids=True),
            complete("cut to what leaves room", LONG, truncate_prompt_tokens=-1),
        ),
        complete("a long prompt again, from the cache", LONG),
        complete("a long prompt with a salt of its own", LONG, cache_salt="salt"),
        complete("an empty prompt", ""),
        complete("a named model and a user", user="somebody", model=None),
        complete("the defaults of the server", temperature=None, max_tokens=None, seed=5),
    ]


def ends() -> list[Exchange]:
    return [
        *both_ways(
            complete("an end token at once", logit_bias={"1": 100}),
            complete("an end of turn, shown", logit_bias={"106": 100}, include_stop_str_in_output=True),
            complete(
                "an end of turn as its literal",
                logit_bias={"106": 100},
                skip_special_tokens=False,
                ignore_eos=True,
            ),
            complete("at least 8 tokens", logit_bias={"1": 100}, min_tokens=8),
            complete("a stop token", allowed_token_ids=[120, 121, 150], stop_token_ids=[150]),
            complete(
                "a stop text", guided_choice=["a quick brown fox"], max_tokens=40, stop=["row", "brown"]
            ),
            complete(
                "a stop text, shown",
                guided_choice=["a quick brown fox"],
                max_tokens=40,
                stop="brown",
                include_stop_str_in_output=True,
            ),
            complete("half a character at the end", guided_choice=["\u00ff\u00ff\u00ff"], max_tokens=3),
            complete("a single token", max_tokens=1),
        ),
        complete("nothing to generate", max_tokens=0),
        complete("nothing to generate, echoed", max_tokens=0, echo=True),
    ]


def draws() -> list[Exchange]:
    return [
        *both_ways(
            drawn("seed 1", 1),
            drawn("hot", 2, temperature=2),
            drawn("cool", 3, temperature=0.3),
            drawn("top_k 5", 4, top_k=5),
            drawn("top_p 0.5", 5, top_p=0.5),
            drawn("min_p 0.2", 6, min_p=0.2),
            drawn("all three", 7, top_k=40, top_p=0.9, min_p=0.01, temperature=0.8),
            drawn(
                "presence and frequency penalties",
                8,
                presence_penalty=1.5,
                frequency_penalty=0.7,
                max_tokens=24,
            ),
            drawn("negative penalties", 9, presence_penalty=-2, frequency_penalty=-1, max_tokens=24),
            complete("repetition penalty, greedy", repetition_penalty=1.8, max_tokens=24),
            drawn("repetition penalty below 1", 10, repetition_penalty=0.5),
            drawn("bias", 11, logit_bias={"120": 5, "150": 4.5, "2": -100}),
            drawn("allowed tokens", 12, allowed_token_ids=list(range(120, 160)), logprobs=2),
            drawn("three choices", 13, n=3),
            complete("three greedy choices", n=3),
            drawn("choices of several prompts", 14, prompt=["One", "Two"], n=2, logprobs=1),
        ),
        drawn("a negative seed", -(2**62)),
        drawn("the largest seed", 2**63 - 1),
        drawn("top_p 0 is greedy", 15, top_p=0),
        drawn("the best of 4", 16, best_of=4, n=2),
        drawn("the best of 3, with log-probabilities", 17, best_of=3, logprobs=2),
        drawn("as many as asked for", 18, best_of=2, n=2),
    ]


def log_probabilities() -> list[Exchange]:
    return [
        *both_ways(
            complete("logprobs 0", logprobs=0),
            complete("logprobs 5", logprobs=5),
            drawn("logprobs 20 of what was drawn", 19, logprobs=20, max_tokens=4),
            complete("echoed, with log-probabilities", logprobs=3, echo=True, max_tokens=3),
            complete("echo of ids", IDS, logprobs=1, echo=True, max_tokens=2, skip_special_tokens=False),
            complete("labels", logprobs=1, logprob_token_ids=[120, 121, 105, 150], max_tokens=2),
            complete("tokens by their ids", logprobs=2, return_tokens_as_token_ids=True, max_tokens=3),
            complete("token ids beside the text", return_token_ids=True),
            complete(
                "with characters of several tokens", guided_choice=["Ünï—çödé"], logprobs=0, max_tokens=30
            ),
        ),
        complete("scores of a prompt", logprobs=1, echo=True, max_tokens=0),
        complete(
            "scores of several prompts", ["The city", "A city of light"], logprobs=0, echo=True, max_tokens=0
        ),
        complete("prompt_logprobs", prompt_logprobs=2, max_tokens=1),
        complete("prompt_logprobs beside echo", prompt_logprobs=1, logprobs=3, echo=True, max_tokens=1),
        complete("prompt_logprobs of a cached prompt", LONG[:60], prompt_logprobs=0, max_tokens=1),
    ]


def usage_and_times() -> list[Exchange]:
    return [
        complete("usage of a stream", stream=True, stream_options={"include_usage": True}),
        complete(
            "usage on every chunk",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        complete(
            "no usage", stream=True, stream_options={"include_usage": False, "include_obfuscation": True}
        ),
        complete(
            "usage of several choices",
            stream=True,
            stream_options={"include_usage": True},
            n=2,
            seed=3,
            temperature=1,
        ),
        *both_ways(complete("timings", return_timings=True)),
        *both_ways(complete("a generous deadline", timeout=3600)),
        complete(
            "fields without meaning",
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            unheard_of=1,
            suffix="",
        ),
    ]


def exchanges() -> list[Exchange]:
    return [*prompts(), *ends(), *draws(), *log_probabilities(), *usage_and_times()]
