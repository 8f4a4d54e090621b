"""Through the runner, a token's numbers are the same bits whatever else is in its batch: on every instruction
set, for every way to store weights and both types of activations, from 1 to 600 rows."""

from dataclasses import replace

import pytest
import torch

from model.config.formats import layer_pattern
from model.network.gemma3 import Gemma3
from model.ops.cpu.backend import CpuOps
from model.ops.cpu.weights import WeightStorage
from tests.model.harness import Harness, TestSequence
from tests.model.ops.cpu.harness import DTYPES, cpu_ops, every_instruction_set
from tests.model.ops.cpu.weights import q5_0
from tests.model.tiny_models import CONFIG as TINY
from tests.model.tiny_models import random_prompt, random_tensors

pytestmark = every_instruction_set

NUM_THREADS = 2
ROWS = 600
# Shapes that every kernel covers, with parts of tiles and panels left over.
CONFIG = replace(
    TINY,
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    global_layers=layer_pattern(2, 2),
    head_dim=64,
)
# Of one sequence: beside the borders of tiles (6 and 12 rows), of blocks of rows (8, 96, 240) and of the
# window.
CHUNKS = (1, 2, 5, 6, 7, 8, 9, 12, 13, 31, 65, 96, 97, 239, 241)


def make_model(ops: CpuOps, *, few_bits: bool) -> Gemma3:
    with torch.inference_mode():
        model = Gemma3(CONFIG, ops, CONFIG.vocab_size - 3)
        tensors = random_tensors(model)
        for name, tensor in tensors.items():
            if few_bits and name.endswith("_proj.weight"):
                tensors[name] = 3.0 * q5_0(*tensor.shape)
        model.load_weights((name, tensor.to(ops.dtype)) for name, tensor in tensors.items())
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["exact", "float32", "bfloat16", "int8", "int5", "int4"])
def test_a_token_is_the_same_bits_in_every_batch(weights: str, dtype: torch.dtype) -> None:
    storage: WeightStorage = "int8" if weights == "int5" else weights  # type: ignore[assignment]
    ops = cpu_ops(dtype, storage)
    model = make_model(ops, few_bits=weights == "int5")
    if weights == "int5":
        assert {model.operands[0].down.storage, model.operands[1].qkv.storage} == {"int5"}  # type: ignore[attr-defined]
    harness = Harness(model, ops, block_size=16, num_tokens=4 * ROWS, num_seqs=ROWS)
    tokens = random_prompt(ROWS, vocab_size=CONFIG.vocab_size)

    whole = harness.all_logits(tokens)  # all in one step
    assert whole.isfinite().all()
    assert torch.equal(harness.all_logits(tokens, chunk_size=1), whole), "one token a step"

    sequence, pieces = TestSequence(list(tokens)), []
    sizes = [*CHUNKS, ROWS - sum(CHUNKS) % ROWS]
    for size in sizes:
        count = min(size, ROWS - sequence.num_computed)
        if count:
            pieces += harness.logits([(sequence, count)])
    assert torch.equal(torch.cat(pieces), whole), "chunks of many sizes"
    harness.release(sequence)

    for others in (1, 7, 40, ROWS - 1):  # beside so many sequences that decode
        beside = [TestSequence(random_prompt(3, seed=index)) for index in range(others)]
        harness.hidden([(other, 2) for other in beside])
        decodes = harness.logits([(other, 1) for other in beside])
        for index in {0, others // 2, others - 1}:
            assert torch.equal(decodes[index], harness.all_logits(beside[index].tokens)[-1:]), (
                f"one of {others} decodes"
            )
        for other in beside:
            harness.release(other)

    sequence, pieces = TestSequence(list(tokens)), []
    other = TestSequence(random_prompt(ROWS, seed=5))
    while sequence.num_computed < ROWS:
        count = min(ROWS - sequence.num_computed, 130)
        mixed = harness.logits([(other, 1 + sequence.num_computed % 3), (sequence, count)])
        pieces.append(mixed[1])
    assert torch.equal(torch.cat(pieces), whole), "a prefill beside another"
    for each in (sequence, other):
        harness.release(each)

    greedy = model.greedy(harness.hidden([(other := TestSequence(list(tokens)), ROWS)])[0])
    if greedy is not None:
        assert torch.equal(greedy, whole.argmax(-1)), "the likeliest token without logits"
    harness.release(other)
