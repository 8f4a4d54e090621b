"""What the tests of CUDA graphs share: a stand-in for the device, whose graph is the captured callable, run
again over the same buffers; and the same work done twice, through graphs and eagerly."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from model.config.gemma3_config import Gemma3Config
from model.execution.cuda_graphs import GraphDevice, padded_sizes
from model.interface.sequence_chunk import SequenceChunk, StepInput
from model.network.gemma3 import Gemma3
from model.ops.interface import Ops
from tests.model.harness import Harness, TestSequence
from tests.model.tiny_models import CONFIG, random_prompt, random_tensors

BLOCK_SIZE = 8
MAX_MODEL_LEN = 200  # three windows
MAX_NUM_SEQS = 20


@dataclass(eq=False)
class RecordedEvent:
    """Counts, and checks the order of use."""

    recorded: int = 0
    synchronized: int = 0

    def record(self) -> None:
        assert self.recorded == self.synchronized, "memory was sent twice without a wait between"
        self.recorded += 1

    def synchronize(self) -> None:
        self.synchronized = self.recorded


@dataclass(eq=False)
class RerunDevice:
    """Captures nothing: replays by calling. Counts what was asked of it, by the number of rows of the
    result."""

    captured: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    events: list[RecordedEvent] = field(default_factory=list)
    before_replay: Callable[[], None] = lambda: None

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = step()
        self.captured.append(len(output))

        def replay() -> torch.Tensor:
            self.before_replay()
            self.replayed.append(len(output))
            output.copy_(step())
            return output  # the same memory each time, as of a graph

        return replay

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)  # never zeroed by chance

    def event(self) -> RecordedEvent:
        self.events.append(RecordedEvent())
        return self.events[-1]


def make_model(ops: Ops, config: Gemma3Config = CONFIG) -> Gemma3:
    with torch.inference_mode():
        model = Gemma3(config, ops, config.vocab_size)
        model.load_weights((name, tensor.to(ops.dtype)) for name, tensor in random_tensors(model).items())
    return model


class LiveHarness(Harness):
    """Hands out what decodes by row, as the engine does, over block tables that the device keeps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.runner.mirrors_tables = True

    def step_of(self, chunks: Sequence[SequenceChunk]) -> StepInput:
        """Those that decode come first."""
        decodes = [chunk for chunk in chunks if chunk.samples and len(chunk.token_ids) == 1]
        assert decodes == list(chunks[: len(decodes)])
        return StepInput(
            self.batch,
            np.array([chunk.row for chunk in decodes], dtype=np.int64),
            np.array([chunk.start for chunk in decodes], dtype=np.int64),
            np.array([chunk.token_ids[0] for chunk in decodes], dtype=np.int64),
            chunks[len(decodes) :],
        )


def make_harness(model: Gemma3, kind: type[Harness]) -> Harness:
    return kind(
        model,
        model.ops,
        block_size=BLOCK_SIZE,
        num_tokens=MAX_NUM_SEQS * MAX_MODEL_LEN,
        num_seqs=MAX_NUM_SEQS,
        seed=5,
    )


class PairedRuns:
    """The same work through graphs and eagerly, over caches of their own."""

    def __init__(
        self,
        model: Gemma3,
        device: GraphDevice,
        kind: type[Harness],
        sizes: Sequence[int] = padded_sizes(MAX_NUM_SEQS),
    ) -> None:
        self.graphed, self.eager = make_harness(model, kind), make_harness(model, Harness)
        self.graphed.runner.capture_graphs(sizes, MAX_MODEL_LEN, device)
        self.pairs: list[tuple[TestSequence, TestSequence]] = []

    def start(self, length: int, seed: int) -> None:
        """A sequence of which all but the last token has been computed."""
        prompt = random_prompt(length, seed=seed)
        pair = TestSequence(list(prompt)), TestSequence(list(prompt))
        for harness, sequence in zip((self.graphed, self.eager), pair, strict=True):
            harness.run([(sequence, length - 1)])
        self.pairs.append(pair)

    def start_made_up(self, length: int, seed: int) -> None:
        """The same without computing anything: keys and values are random numbers."""
        pair = TestSequence(random_prompt(length, seed=seed)), TestSequence(random_prompt(length, seed=seed))
        for harness, sequence in zip((self.graphed, self.eager), pair, strict=True):
            harness.chunk(sequence, length - 1)
            generator = torch.Generator().manual_seed(seed)
            for layer, is_global in zip(harness.cache.layers, harness.config.global_layers, strict=True):
                blocks = sequence.global_table if is_global else sequence.local_table
                for cache in (layer.keys, layer.values):
                    flat = torch.randn((len(blocks) * BLOCK_SIZE, *cache.shape[2:]), generator=generator)
                    flat[length - 1 :] = torch.nan
                    cache[blocks] = flat.view(len(blocks), *cache.shape[1:]).to(cache)
            harness._advance([(sequence, length - 1)])
        self.pairs.append(pair)

    def end(self, index: int) -> None:
        for harness, sequence in zip((self.graphed, self.eager), self.pairs.pop(index), strict=True):
            harness.release(sequence)

    def poison(self) -> None:
        """Whatever padding wrote to the null block must not matter, nor what stands there."""
        for harness in (self.graphed, self.eager):
            for layer in harness.cache.layers:
                layer.keys[0] = torch.nan
                layer.values[0] = torch.nan

    @torch.inference_mode()
    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One decode step of all sequences: final hidden states [n, h] of both."""
        hidden = []
        for side, harness in enumerate((self.graphed, self.eager)):
            chunks = [harness.chunk(pair[side], 1) for pair in self.pairs]
            hidden.append(harness.runner._run_network(harness.step_of(chunks))[1].clone())
            harness.batch.changes.clear()
            harness._advance([(pair[side], 1) for pair in self.pairs])
        tokens = harness.runner.model.logits(hidden[1]).argmax(-1).tolist()
        for pair, token in zip(self.pairs, tokens, strict=True):
            for sequence in pair:
                sequence.tokens.append(token)
        return hidden[0], hidden[1]


def long_life(runs: PairedRuns) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch size across the borders of the padding, sequences that come and go at random places, tables
    that grow."""
    shuffle = random.Random(3)
    for length in (3, 70, 9):
        runs.start(length, seed=length)
    for target in (*range(3, MAX_NUM_SEQS + 1), 9, 8, 7, 17, 16, 15, 5, 4, 3, 2, 1, 12):
        while len(runs.pairs) > target:
            runs.end(shuffle.randrange(len(runs.pairs)))
        while len(runs.pairs) < target:
            runs.start(shuffle.choice((3, 8, 9, 17, 64, 65, 73, 130)), seed=shuffle.randrange(1000))
            if shuffle.random() < 0.3:
                shuffle.shuffle(runs.pairs)
        runs.poison()
        yield runs.step()
    for _ in range(2 * BLOCK_SIZE):
        yield runs.step()
