"""Random requests from a seed: prompts of every form with shared beginnings, all sampling parameters,
requests that must be refused, and clients that leave early."""

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.http.cache.tiny_server import CHAT, COMPLETIONS, NUM_TOKENS, PLAIN_TEXT, VOCAB_SIZE
from tests.soak.client import Leave
from tests.soak.server_process import BLOCK_SIZE, CACHE_TOKENS

WORDS = ("a", "will", "hello", "ab", "in", "the", "cow", "jumps", "over", "moons", "1", "22", "é")
STREAM: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
LONG_MAX_TOKENS = CACHE_TOKENS - 100
STOPS = ("a", "e", "o", " ", "ll", "<b>", "zz", "in")


@dataclass(frozen=True, slots=True)
class Job:
    """``rejection``: the reason for which it must be refused, as the metric names it. ``prompt_lengths`` are
    None for text."""

    path: str
    body: dict[str, Any]
    prompt_lengths: tuple[int, ...] | None = None
    rejection: str | None = None
    status: int = 200
    leave: Leave | None = None
    payload: bytes | None = None  # sent instead of the body

    @property
    def endpoint(self) -> str:
        return "completions" if self.path == COMPLETIONS else "chat_completions"

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def is_greedy(self) -> bool:
        return bool(self.body.get("temperature", 1) == 0)

    @property
    def sequences_per_prompt(self) -> int:
        """Equal choices of a greedy request are computed once."""
        return 1 if self.is_greedy else self.num_choices

    @property
    def encoded(self) -> bytes:
        return json.dumps(self.body).encode() if self.payload is None else self.payload


class Workload:
    """One client's endless supply, of answers up to ``max_tokens``. ``calm``: nobody leaves, and every cached
    token can be known from the answers."""

    def __init__(self, seed: str, *, calm: bool, max_tokens: int) -> None:
        self._random = random.Random(seed)
        self._calm = calm
        self._max_tokens = max_tokens
        shared = random.Random("prefixes")  # the same for all clients and rounds
        self._prefixes = [_ids(shared, length) for length in (16, 31, 32, 64, 100, 160)]

    def next(self) -> Job:
        draw = self._random.random()
        if draw < 0.05:
            return self._refused()
        job = self._chat() if draw < 0.25 else self._completion()
        if self._calm or self._random.random() > 0.3:
            return job
        leave = Leave(
            after_events=self._random.choice((0, 1, 5, 50)),
            after_seconds=self._random.choice((0.0, 0.01, 0.1, 0.5, 5.0)),
            reset=self._random.random() < 0.5,
        )
        return Job(job.path, job.body, job.prompt_lengths, leave=leave)

    def last(self) -> Job | None:
        """A client's last request of a round. In a rough one all leave long answers at once, so that work
        that goes on for nobody would be noticed."""
        if self._calm:
            return None
        prompt = self._prompt()
        body = {
            "prompt": prompt,
            "max_tokens": LONG_MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **STREAM,
        }
        leave = Leave(
            after_events=self._random.choice((0, 1, 5)), after_seconds=1.0, reset=self._random.random() < 0.5
        )
        return Job(COMPLETIONS, body, (len(prompt),), leave=leave)

    def _completion(self) -> Job:
        choose = self._random
        body = self._parameters()
        lengths: tuple[int, ...] | None = None
        if choose.random() < 0.15:
            body["prompt"] = " ".join(choose.choices(WORDS, k=choose.randint(1, 40)))
        else:
            prompts = [self._prompt() for _ in range(choose.choice((1, 1, 1, 1, 1, 2, 4)))]
            lengths = tuple(map(len, prompts))
            body["prompt"] = prompts[0] if len(prompts) == 1 and choose.random() < 0.8 else prompts
        if choose.random() < 0.4:
            body["logprobs"] = choose.choice((0, 1, 5))
            body["echo"] = choose.random() < 0.5
        elif choose.random() < 0.05:
            body["max_tokens"] = 0
            body.pop("min_tokens", None)
        if (
            self._calm
            and body["temperature"] > 0
            and body["n"] > 1
            and not ("logprobs" in body and body["echo"])
        ):
            # Only the first choice's cached tokens are in the usage. Prompts of at most a block never hit.
            short = _ids(choose, choose.randint(1, BLOCK_SIZE))
            body["prompt"], lengths = short, (len(short),)
        return Job(COMPLETIONS, body, lengths)

    def _chat(self) -> Job:
        choose = self._random
        body = self._parameters()
        if self._calm and body["temperature"] > 0:
            body["n"] = 1
        body["messages"] = [
            {
                "role": ("user", "assistant")[turn % 2],
                "content": " ".join(choose.choices(WORDS, k=choose.randint(1, 12))),
            }
            for turn in range(choose.choice((1, 1, 3, 5)))
        ]
        if choose.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": choose.choice((0, 3))}
        return Job(CHAT, body)

    def _prompt(self) -> list[int]:
        choose = self._random
        own = _ids(choose, int(2 ** choose.uniform(0, 7.5)))
        return choose.choice(self._prefixes)[:] + own[1:] if choose.random() < 0.5 else own

    def _parameters(self) -> dict[str, Any]:
        choose = self._random
        body: dict[str, Any] = {
            "max_tokens": int(self._max_tokens ** choose.uniform(0, 1)),
            "temperature": choose.choice((0, 0, 0.7, 1.0, 2.0)),
            "n": choose.choice((1, 1, 1, 1, 1, 2, 3)),
            "ignore_eos": choose.random() < 0.5,
        }
        options: dict[str, Any] = {
            "seed": choose.randrange(1000),
            "top_p": choose.choice((0.5, 0.9)),
            "top_k": choose.choice((1, 20)) if body["temperature"] == 0 else 20,
            "min_p": 0.05,
            "presence_penalty": choose.choice((-1.0, 1.5)),
            "frequency_penalty": choose.choice((0.5, 2.0)),
            "repetition_penalty": choose.choice((0.9, 1.3)),
            "logit_bias": PLAIN_TEXT,
            "stop": choose.sample(STOPS, k=choose.randint(1, 3)),
            "stop_token_ids": [choose.randrange(VOCAB_SIZE)],
            "min_tokens": choose.randint(0, body["max_tokens"]),
            "cache_salt": choose.choice(("x", "y")),
        }
        body |= {name: value for name, value in options.items() if choose.random() < 0.25}
        if choose.random() < 0.5:
            body |= STREAM
        return body

    def _refused(self) -> Job:
        choose = self._random
        good = {"prompt": [2, 30, 31], "max_tokens": 4}
        return choose.choice(
            (
                Job(COMPLETIONS, good | {"temperature": 3}, rejection="invalid", status=400),
                Job(COMPLETIONS, good | {"prompt": [VOCAB_SIZE]}, rejection="invalid", status=400),
                Job(COMPLETIONS, good | {"max_tokens": -1}, rejection="invalid", status=400),
                Job(COMPLETIONS, {"max_tokens": 4}, rejection="invalid", status=400),
                Job(COMPLETIONS, {}, rejection="invalid", status=400, payload=b'{"prompt": "a"'),
                Job(
                    COMPLETIONS,
                    good | {"prompt": [5] * (CACHE_TOKENS + 1)},
                    rejection="context_length",
                    status=400,
                ),
                Job(
                    COMPLETIONS,
                    good | {"prompt": [[2, 3], [5] * 3000]},
                    rejection="context_length",
                    status=400,
                ),
                Job(
                    CHAT,
                    {"messages": [{"role": "user", "content": "a"}], "n": 0},
                    rejection="invalid",
                    status=400,
                ),
                Job(CHAT, {"messages": []}, rejection="invalid", status=400),
                Job(COMPLETIONS, good | {"model": "other"}, rejection="model_not_found", status=404),
            )
        )


def _ids(choose: random.Random, length: int) -> list[int]:
    return [2, *choose.choices(range(20, NUM_TOKENS), k=length - 1)]


def steady_prompts() -> list[dict[str, Any]]:
    """Greedy requests of unpenalised answers, to be repeated all along."""
    choose = random.Random("steady")
    return [
        {
            "prompt": _ids(choose, length),
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
        }
        for length in (3, 16, 17, 48, 65, 80, 129, 200, 31, 250)
    ]
