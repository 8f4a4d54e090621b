"""Float32 logits do not depend on how the work is cut up: chunk sizes, block sizes, neighbours in the batch,
recycled blocks. All memory that a sequence does not own is NaN throughout, and local blocks are recycled and
handed out again after every step.
"""

import itertools

import pytest
import torch

from model.network.gemma3 import Gemma3
from tests.model.harness import Harness, TestSequence, assert_close
from tests.model.tiny_models import all_local_config, load_tiny, random_model, random_prompt

# The same sums in another order: about 1e-5 in float32 on logits of this size.
TOLERANCE = 1e-4
# Around a block of 16 and a window of 64, as 511, 512, 513, 527, 528, 529, 1023, 1024, 1025, 1500 lie around
# a window of 512.
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 190]


@pytest.fixture(scope="module")
def model() -> Gemma3:
    return random_model()


@pytest.fixture(scope="module")
def whole(model: Gemma3) -> torch.Tensor:
    """Logits of a long prompt in one chunk, in memory that is all its own."""
    return Harness(model, model.ops, block_size=16, num_tokens=600).all_logits(random_prompt(600))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("chunk_size", [1, 15, 16, 17, 64, 512, None])
def test_chunk_and_block_sizes_do_not_change_the_logits(
    model: Gemma3, whole: torch.Tensor, chunk_size: int | None, block_size: int
) -> None:
    length = 200 if chunk_size == 1 else 600
    harness = Harness(model, model.ops, block_size=block_size, num_tokens=600)
    assert_close(harness.all_logits(random_prompt(600)[:length], chunk_size), whole[:length], TOLERANCE)
    if chunk_size is not None and chunk_size < 100:
        assert harness.recycled > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_blocks_and_windows(model: Gemma3, whole: torch.Tensor, length: int) -> None:
    """Case 14: exact at every length, for chunks of a block, a window, one less and one more; three times the
    same."""
    tokens = random_prompt(600)[:length]
    harness = Harness(model, model.ops, block_size=16, num_tokens=200)
    for chunk_size in (15, 16, 17, 63, 64, 65, None):
        logits = harness.all_logits(tokens, chunk_size)
        assert_close(logits, whole[:length], TOLERANCE)
    for _ in range(2):
        assert torch.equal(harness.all_logits(tokens, 64), harness.all_logits(tokens, 64))


def test_generated_tokens_have_the_logprobs_of_a_fresh_prefill() -> None:
    """Case 14: generation across many windows equals teacher forcing of the same ids."""
    model = load_tiny("mqa_layer_types")
    harness = Harness(model, model.ops, block_size=4, num_tokens=200)
    prompt = random_prompt(30)
    tokens = list(prompt)
    rows = [harness.all_logits(prompt)[-1]]
    sequence = TestSequence(list(prompt))
    harness.logits([(sequence, len(prompt))])
    for _ in range(90):
        tokens.append(int(rows[-1].argmax()))
        sequence.tokens.append(tokens[-1])
        rows.append(harness.logits([(sequence, 1)])[0][-1])
    fresh = Harness(model, model.ops, block_size=8, num_tokens=200).all_logits(tokens, 33)
    assert_close(torch.stack(rows), fresh[len(prompt) - 1 :], TOLERANCE)


def test_neighbours_do_not_change_the_logits(model: Gemma3, whole: torch.Tensor) -> None:
    """Mixed prefill chunks and decodes of sequences of many lengths, each against its own solo run."""
    harness = Harness(model, model.ops, block_size=8, num_tokens=3000, num_seqs=16)
    long_prompt = random_prompt(600)
    prompts = [
        long_prompt[:400],
        *(random_prompt(length) for length in (1, 2, 7, 8, 9, 63, 64, 65, 66, 130, 200, 3)),
    ]
    solo = [
        whole[:400],
        *(Harness(model, model.ops, block_size=16, num_tokens=600).all_logits(p) for p in prompts[1:]),
    ]
    sequences = [TestSequence(list(prompt)) for prompt in prompts]
    rows: dict[TestSequence, list[torch.Tensor]] = {sequence: [] for sequence in sequences}
    for step in itertools.count():
        # Late sequences join later; each takes a chunk of its own size, so that prefills and decodes of all
        # lengths meet.
        work = []
        for index, sequence in enumerate(sequences):
            left = len(sequence.tokens) - sequence.num_computed
            if left and step >= index // 2:
                work.append((sequence, min(left, 1 if step > 12 and index else 1 + 7 * index)))
        if not work and step > 8:
            break
        for (sequence, _), logits in zip(work, harness.logits(work), strict=True):
            rows[sequence].append(logits)
    for sequence, expected in zip(sequences, solo, strict=True):
        assert_close(torch.cat(rows[sequence]), expected, TOLERANCE)
        harness.release(sequence)
    assert harness.recycled > 40
    assert len(harness.free[True]) == len(set(harness.free[True]))
    assert len(harness.free[False]) == len(set(harness.free[False]))


def test_a_decode_batch_of_many_lengths_equals_each_alone(model: Gemma3) -> None:
    prompts = [random_prompt(length) for length in range(1, 140, 6)]
    harness = Harness(model, model.ops, block_size=16, num_tokens=3000, num_seqs=len(prompts))
    sequences = [TestSequence(list(prompt)) for prompt in prompts]
    for sequence in sequences:
        if len(sequence.tokens) > 1:
            harness.logits([(sequence, len(sequence.tokens) - 1)])
    batched = harness.logits([(sequence, 1) for sequence in sequences])
    alone = Harness(model, model.ops, block_size=16, num_tokens=200)
    for prompt, logits in zip(prompts, batched, strict=True):
        assert_close(logits[0], alone.all_logits(prompt)[-1], TOLERANCE)


def test_a_model_of_local_layers_only_recycles_all_but_its_window() -> None:
    model = random_model(all_local_config(num_layers=3, window=8))
    harness = Harness(model, model.ops, block_size=4, num_tokens=120)
    tokens = random_prompt(120)
    whole = Harness(model, model.ops, block_size=8, num_tokens=120).all_logits(tokens)
    assert_close(harness.all_logits(tokens, 1), whole, TOLERANCE)
    assert harness.recycled >= 120 // 4 - 8 // 4 - 1
