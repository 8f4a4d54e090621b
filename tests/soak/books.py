"""What the counters on /metrics must show for a round of requests, worked out from what the clients sent and
received.

The rules, each exact:
- ``prompt_tokens_total``: each sequence in the engine counts its whole prompt when its first output arrives.
  A prompt is one
  sequence per choice, but one for all choices when the request is greedy.
- ``prompt_tokens_cached_total``: the same, with the part found in the prefix cache. ``usage`` has that of
  each prompt's first
  choice; the other choices of a sampled request may hit up to the last full block that leaves one token to
  compute.
- ``generation_tokens_total``: ``usage.completion_tokens`` of finished requests, and of one whose client left,
  the tokens handed
  to the connection: at least those it received.
- ``requests_total``: one outcome per request that was accepted: "length" when any choice ended so, else
  "stop";
  "client_disconnect" when the client left before the end. A request never read by the server counts nowhere.
- ``request_rejections_total``: one per refused request, which counts in none of the others.
- ``choices_total``: every choice that ended in a finished request.

Of a client that left, only the server's log knows whether work had begun and how many tokens were handed
over. Its record is held against what the client saw, then taken into the books; where sequences of one
request may have begun or not, a counter gets a range.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak.client import Reply
from tests.soak.server_process import BLOCK_SIZE, LogRecord, Samples
from tests.soak.workload import Job


@dataclass(slots=True)
class Range:
    low: int = 0
    high: int = 0

    def add(self, low: int, high: int | None = None) -> None:
        self.low += low
        self.high += low if high is None else high


@dataclass(slots=True)
class Books:
    prompt_tokens: Range = field(default_factory=Range)
    cached_tokens: Range = field(default_factory=Range)
    generated_tokens: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    rejections: Counter[tuple[str, str]] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    num_left: int = 0
    num_finished: int = 0

    def enter(
        self,
        job: Job,
        reply: Reply,
        usage: dict[str, Any] | None,
        reasons: list[str],
        record: LogRecord | None,
    ) -> None:
        """``usage``: the last one that the client saw; ``reasons``: of its finished choices."""
        if job.rejection is not None:
            assert record is None, "a refused request counts as refused alone"
            self.rejections[job.endpoint, job.rejection] += 1
        elif reply.left:
            self.num_left += 1
            if record is not None:
                self._enter_left(job, usage, record)
        else:
            assert usage is not None
            assert record is not None, "every finished request is logged"
            self._enter_finished(job, usage, reasons, record)

    def _enter_finished(self, job: Job, usage: dict[str, Any], reasons: list[str], record: LogRecord) -> None:
        self.num_finished += 1
        outcome = "length" if "length" in reasons else "stop"
        told = (record.endpoint, record.outcome, record.prompt_tokens, record.generated_tokens)
        assert told == (job.endpoint, outcome, usage["prompt_tokens"], usage["completion_tokens"]), (
            job,
            usage,
            record,
        )
        self.outcomes[job.endpoint, outcome] += 1
        self.choices.update(reasons)
        self.generated_tokens += usage["completion_tokens"]
        self.prompt_tokens.add(usage["prompt_tokens"] * job.sequences_per_prompt)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        others = (job.sequences_per_prompt - 1) * _most_cached(job, record)
        self.cached_tokens.add(cached, cached + others)

    def _enter_left(self, job: Job, usage: dict[str, Any] | None, record: LogRecord) -> None:
        assert record.outcome in ("client_disconnect", "stop", "length"), record
        assert record.endpoint == job.endpoint
        self.outcomes[job.endpoint, record.outcome] += 1
        seen = 0 if usage is None else usage["completion_tokens"]
        asked = job.body["max_tokens"] * job.num_choices * len(job.prompt_lengths or (0,))
        assert seen <= record.generated_tokens <= asked, (seen, record, asked)
        self.generated_tokens += record.generated_tokens
        if not record.started and job.body["max_tokens"] > 0:
            return
        most_cached = _most_cached(job, record) * job.sequences_per_prompt
        all_prompts = record.prompt_tokens * job.sequences_per_prompt
        is_one = job.sequences_per_prompt * len(job.prompt_lengths or (0,)) == 1
        begun = all_prompts if is_one and record.started else 0
        self.prompt_tokens.add(begun, all_prompts)
        cached = 0 if usage is None else usage["prompt_tokens_details"]["cached_tokens"]
        self.cached_tokens.add(cached, cached if is_one and usage is not None else most_cached)

    @property
    def are_exact(self) -> bool:
        return all(item.low == item.high for item in (self.prompt_tokens, self.cached_tokens))

    def compare(self, before: Samples, after: Samples) -> None:
        def counted(name: str, **labels: str) -> int:
            wanted = set(labels.items())
            return int(
                sum(after[key] - before.get(key, 0) for key in after if key[0] == name and wanted <= key[1])
            )

        assert counted("generation_tokens_total") == self.generated_tokens
        for name, book in (
            ("prompt_tokens_total", self.prompt_tokens),
            ("prompt_tokens_cached_total", self.cached_tokens),
        ):
            assert book.low <= counted(name) <= book.high, (name, counted(name), book)
        for endpoint in ("completions", "chat_completions"):
            for outcome in ("stop", "length", "client_disconnect", "shutdown", "error"):
                value = counted("requests_total", endpoint=endpoint, outcome=outcome)
                assert value == self.outcomes[endpoint, outcome], (endpoint, outcome, value, self.outcomes)
            for reason in {key[1] for key in self.rejections} | {
                "invalid",
                "context_length",
                "not_ready",
                "draining",
            }:
                value = counted("request_rejections_total", endpoint=endpoint, reason=reason)
                assert value == self.rejections[endpoint, reason], (endpoint, reason, value, self.rejections)
        if not self.num_left:
            for reason in ("stop", "length"):
                assert counted("choices_total", finish_reason=reason) == self.choices[reason]
        assert counted("numerical_faults_total") == 0


def _most_cached(job: Job, record: LogRecord) -> int:
    """Most tokens of one sequence per prompt that the prefix cache can supply."""
    if job.body.get("echo"):
        return 0  # log-probabilities of a prompt are computed, never cached
    lengths = job.prompt_lengths or (record.prompt_tokens,)
    return sum((length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths)
