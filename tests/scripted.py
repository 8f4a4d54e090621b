"""A model that says what a test wants: the text of the request's seed (and choice), then the end of the
turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult
from tests.fakes import END_OF_TURN, FakeRunner, fake_engine_factory, fake_tokenizer
from tests.http.live_server import LiveServer, live_server
from tests.steps import StepSequence

TOKENIZER = fake_tokenizer()
FAILS = "\N{BOMB}"  # where the text has it, the request fails


@dataclass
class ScriptedRunner(FakeRunner):
    """``texts[seed + choice]``; other seeds draw as the fake does."""

    texts: Sequence[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scripts = [TOKENIZER.encode_plain(text.partition(FAILS)[0]) for text in self.texts]

    def _run_chunk(self, chunk: StepSequence) -> ChunkResult:
        seed, num_output = chunk.sampling.seed, len(chunk.output_token_ids)
        if (
            seed < len(self.texts)
            and FAILS in self.texts[seed]
            and chunk.samples
            and num_output >= len(self._scripts[seed])
        ):
            return ChunkResult(error="the logits are not finite")
        return super()._run_chunk(chunk)

    def _sample(self, tokens: Sequence[int], num_output: int, sampling: SamplingParams) -> int:
        which = sampling.seed + sampling.choice
        if which >= len(self._scripts):
            return super()._sample(tokens, num_output, sampling)
        script = self._scripts[which]
        return script[num_output] if num_output < len(script) else END_OF_TURN


@contextmanager
def scripted_server(
    texts: Sequence[str], *, step_delay: float = 0.0, max_num_seqs: int = 3, **settings: Any
) -> Iterator[LiveServer]:
    runner = ScriptedRunner(step_delay=step_delay, texts=texts)
    factory = fake_engine_factory(
        runner, max_model_len=1536, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048
    )
    with live_server(factory, **settings) as live:
        yield live
