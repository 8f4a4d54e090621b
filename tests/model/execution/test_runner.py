"""ModelRunner: loading, settings, memory, prompt scoring, and steps through its public interface."""

import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model import precision
from model.checkpoint.open import open_checkpoint
from model.config.tensors import parameter_count
from model.execution import runner as runner_module
from model.execution.runner import ModelRunner, resolve_dtype
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCachePlan
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import StepInput, StepMemoryError
from model.network.gemma3 import Gemma3
from model.ops.reference import ReferenceOps
from tests.model.checkpoint.conftest import random_weights, write_gguf
from tests.model.harness import GREEDY, Harness, TestSequence, assert_close
from tests.model.ops.cpu.harness import needs_kernels
from tests.model.tiny_models import TINY_FOLDER, random_model, random_prompt

CPU = torch.device("cpu")
SCORING = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def model() -> Gemma3:
    return random_model()


@pytest.mark.parametrize("dtype", ["float16", "half", "float64", "int8", ""])
def test_dtypes_that_do_not_work_are_refused_with_a_remedy(dtype: str) -> None:
    """Case 1: Gemma 3 overflows in float16."""
    with pytest.raises(ConfigError, match="Use bfloat16, float32 or auto"):
        resolve_dtype(dtype, CPU)


def test_auto_dtype_is_bfloat16_where_the_device_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(precision, "cpu_computes_bfloat16", lambda native=native: native)
        assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_load_run_and_generate() -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "gqa_sliding_window_pattern"), progress=False)
    runner = ModelRunner.load(checkpoint, dtype="float32", device="cpu", block_size=4, progress=False)
    assert runner.dtype == "float32"
    # a backend may keep a tied head twice
    assert runner.weight_bytes >= parameter_count(checkpoint.config, tied=True) * 4
    assert runner.spec.bytes_per_token_per_layer == 2 * 2 * 16 * 4
    assert runner.free_memory() > 0
    runner.allocate_cache(KVCachePlan(20, 20, 0, 0, 76))
    runner.warm_up()
    harness = Harness(runner.model, runner.ops, block_size=4, num_tokens=80)
    sequence = TestSequence(random_prompt(20))
    for _ in range(10):
        (result,) = harness.run([(sequence, len(sequence.tokens) - sequence.num_computed)])
        sequence.tokens += result.token_ids
    fresh = harness.all_logits(sequence.tokens)
    assert sequence.tokens[20:] == fresh[19:-1].argmax(-1).tolist()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("form", ["gguf", "huggingface"])
def test_loading_draws_one_bar_whatever_form_the_checkpoint_has(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TINY_FOLDER / "gqa_sliding_window_pattern"
    if form == "gguf":
        source = write_gguf(tmp_path / "tiny.gguf", random_weights())
    checkpoint = open_checkpoint(str(source), cache_dir=tmp_path)

    def shown(*, progress: bool) -> str:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        ModelRunner.load(checkpoint, dtype="float32", device="cpu", block_size=4, progress=progress)
        return terminal.getvalue()

    text = shown(progress=True)
    bars = re.findall(r"(\S[^\r\n:]*): +0%\|", text)
    assert bars == ["Loading weights"], text
    assert "Loading weights: 100%|" in text
    assert shown(progress=False) == ""


def test_memory_is_told_by_what_it_holds() -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "gqa_sliding_window_pattern"), progress=False)
    runner = ModelRunner.load(checkpoint, dtype="float32", device="cpu", block_size=4, progress=False)
    runner.allocate_cache(KVCachePlan(20, 20, 4000, 3000, 76))
    assert runner.memory_bytes() == {
        "weights": runner.weight_bytes,
        "kv_cache": 7000,
        "device_free": pytest.approx(runner.free_memory(), rel=0.5),
    }


@needs_kernels
@pytest.mark.parametrize(("quantization", "dtype"), [("none", torch.float32), ("int8", torch.bfloat16)])
def test_a_cache_takes_the_bytes_of_its_plan(quantization: str, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "gqa_sliding_window_pattern"), progress=False)
    runner = ModelRunner.load(
        checkpoint, dtype="float32", device="cpu", quantization=quantization, block_size=4, progress=False
    )
    plan = runner.spec.plan_of_blocks(5, 7)
    runner.allocate_cache(plan)
    assert runner.cache is not None
    tensors = [tensor for layer in runner.cache.layers for tensor in (layer.keys, layer.values)]
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert sum(tensor.nbytes for tensor in tensors) == plan.global_bytes + plan.local_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_also_tells_what_a_step_took_beside_weights_and_cache() -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "gqa_sliding_window_pattern"), progress=False)
    runner = ModelRunner.load(checkpoint, dtype="float32", device="cuda", block_size=4, progress=False)
    runner.allocate_cache(KVCachePlan(20, 20, 4000, 3000, 76))
    assert runner.memory_bytes()["activations_peak"] == 0
    runner.warm_up()
    assert 0 < runner.memory_bytes()["activations_peak"] < 1 << 30


def test_the_time_of_sampling_adds_up_from_after_the_warm_up() -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "gqa_sliding_window_pattern"), progress=False)
    runner = ModelRunner.load(checkpoint, dtype="float32", device="cpu", block_size=4, progress=False)
    runner.allocate_cache(KVCachePlan(20, 20, 0, 0, 76))
    runner.warm_up()
    assert runner.sample_seconds == 0
    runner.run(StepInput.of_prompt([2], [1], GREEDY, samples=True))
    first = runner.sample_seconds
    runner.run(StepInput.of_prompt([3], [1], GREEDY, samples=True))
    assert 0 < first < runner.sample_seconds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"device": "quantum"}, "quantum"),
        ({"device": "meta"}, "meta"),
        ({"block_size": 3}, "block-size"),
    ],
)
def test_bad_settings_end_the_load(settings: dict[str, object], message: str) -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "head_equal"), progress=False)
    with pytest.raises(ConfigError, match=message):
        ModelRunner.load(checkpoint, progress=False, **settings)  # type: ignore[arg-type]


def test_a_cache_too_large_for_the_device_is_a_readable_error(model: Gemma3) -> None:
    runner = ModelRunner(model, model.config.kv_cache_spec(16, 4), model.ops)
    with pytest.raises(ConfigError, match="kv-cache-memory"):
        runner.allocate_cache(KVCachePlan(1 << 40, 1 << 40, 1 << 60, 1 << 60, 1))


def test_an_empty_step_is_allowed(model: Gemma3) -> None:
    assert Harness(model, model.ops, block_size=16, num_tokens=16).run_chunks([]) == []


def test_bfloat16_runs_and_is_close_to_float32() -> None:
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(dtype=dtype)
        logits.append(
            Harness(model, model.ops, block_size=16, num_tokens=100).all_logits(random_prompt(100), 37)
        )
    # Eight bits of mantissa through seven layers, on logits of magnitude 3.
    assert (logits[0] - logits[1]).abs().mean() < 0.1


@pytest.mark.parametrize("chunk_size", [1, 16, 100])
def test_prompt_logprobs_are_those_of_the_logits_for_every_chunk_size(model: Gemma3, chunk_size: int) -> None:
    prompt = random_prompt(100)
    harness = Harness(model, model.ops, block_size=16, num_tokens=200, num_seqs=2)
    expected = harness.all_logits(prompt).log_softmax(-1)
    sequence = TestSequence(prompt, SCORING)
    entries = []
    while sequence.num_computed < len(prompt):
        (result,) = harness.run(
            [(sequence, min(chunk_size, len(prompt) - sequence.num_computed))], score=True
        )
        assert result.error is None
        entries += result.prompt_logprobs
    assert [entry.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[position, entry.token_id].item(), abs=1e-4)
        assert len(entry.top) == 2
        for token_id, value in entry.top:
            assert value == pytest.approx(expected[position, token_id].item(), abs=1e-4)
            assert token_id != entry.token_id or value == entry.logprob


def test_logits_of_a_long_prompt_are_made_in_bounded_slices(
    model: Gemma3, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    whole = Gemma3.logits

    def counted(self: Gemma3, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return whole(self, hidden)

    monkeypatch.setattr(Gemma3, "logits", counted)
    harness = Harness(model, model.ops, block_size=16, num_tokens=500)
    prompt = random_prompt(300)
    (result,) = harness.run([(TestSequence(prompt, SCORING), 300)], score=True)
    assert len(result.prompt_logprobs) == 299
    assert max(rows) <= runner_module.MAX_LOGITS_ROWS
    assert sum(rows) == 299 + 1
    rows.clear()
    harness.run([(TestSequence(random_prompt(100)), 99)])
    assert rows == []  # neither sampled nor scored: no logits at all


def test_scoring_and_generating_mix_in_one_step(model: Gemma3) -> None:
    harness = Harness(model, model.ops, block_size=16, num_tokens=400, num_seqs=3)
    expected = harness.all_logits(random_prompt(50)).log_softmax(-1)
    scored = TestSequence(random_prompt(50), replace(SCORING, prompt_logprobs=0))
    plain = TestSequence(random_prompt(30), replace(GREEDY, logprobs=1))
    results = harness.run([(plain, 30), (scored, 50)], score=True)
    assert len(results[0].token_ids) == len(results[0].logprobs) == 1
    assert results[0].prompt_logprobs == []
    assert len(results[1].prompt_logprobs) == 49
    assert all(entry.top == [] for entry in results[1].prompt_logprobs)
    assert results[1].prompt_logprobs[7].logprob == pytest.approx(
        expected[7, scored.tokens[8]].item(), abs=1e-4
    )


def test_one_sequence_with_logits_that_are_not_finite_fails_alone(model: Gemma3) -> None:
    harness = Harness(model, model.ops, block_size=16, num_tokens=200, num_seqs=3)
    sequences = [TestSequence(random_prompt(20), replace(SCORING, prompt_logprobs=1)) for _ in range(3)]
    harness.run([(sequence, 19) for sequence in sequences])
    harness.cache.layers[0].values[sequences[1].local_table[0], 3] = math.inf
    results = harness.run([(sequence, 1) for sequence in sequences])
    assert [result.error is None for result in results] == [True, False, True]
    assert [len(result.token_ids) for result in results] == [1, 0, 1]


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_pooled_states_are_those_of_the_whole_prompt(model: Gemma3, chunk_size: int) -> None:
    harness = Harness(model, model.ops, block_size=16, num_tokens=400, num_seqs=3)
    (expected,) = harness.hidden([(TestSequence(random_prompt(100)), 100)])
    pooled, neighbour = TestSequence(random_prompt(100)), TestSequence(random_prompt(30))
    total, num_steps = torch.zeros(expected.shape[1], dtype=torch.float64), 0
    while pooled.num_computed < 100:
        count = min(chunk_size, 100 - pooled.num_computed)
        chunks = [harness.chunk(pooled, count)]
        chunks[0].pooling = True
        if num_steps == 0:
            chunks.append(harness.chunk(neighbour, 30))
        results = harness.run_chunks(chunks)
        harness._advance([(pooled, count), *([(neighbour, 30)] if num_steps == 0 else [])])
        assert all(result.hidden_sum is None for result in results[1:])
        total += torch.from_numpy(results[0].hidden_sum)
        num_steps += 1
    assert_close(total, expected.sum(0, dtype=torch.float64), 1e-3)  # of 100 float32 rows


def test_pooled_states_that_are_not_finite_fail_alone(model: Gemma3) -> None:
    harness = Harness(model, model.ops, block_size=16, num_tokens=200, num_seqs=2)
    sequences = [TestSequence(random_prompt(20)) for _ in range(2)]
    harness.run([(sequence, 19) for sequence in sequences])
    harness.cache.layers[0].values[sequences[1].local_table[0], 3] = math.inf
    chunks = [harness.chunk(sequence, 1) for sequence in sequences]
    for chunk in chunks:
        chunk.pooling, chunk.samples = True, False
    sound, failed = harness.run_chunks(chunks)
    assert sound.error is None
    assert sound.hidden_sum is not None
    assert failed.error is not None
    assert failed.hidden_sum is None


def test_a_target_without_a_token_fails_alone() -> None:
    model = random_model()
    model.head.num_valid_tokens = 100
    harness = Harness(model, model.ops, block_size=16, num_tokens=200, num_seqs=2)
    odd, even = TestSequence([2, 120, 5], SCORING), TestSequence([2, 20, 5], SCORING)
    results = harness.run([(odd, 3), (even, 3)], score=True)
    assert results[0].error is not None
    assert results[0].token_ids == []
    assert results[1].error is None
    assert len(results[1].prompt_logprobs) == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: "
            "can't allocate memory: you tried to"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
    ],
    ids=["cpu", "cuda", "host"],
)
def test_a_lack_of_memory_is_told_and_the_same_step_can_be_run_again(
    model: Gemma3, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    harness = Harness(model, ReferenceOps(CPU, torch.float32), block_size=4, num_tokens=80)
    sequence = TestSequence(random_prompt(20))
    chunk = harness.chunk(sequence, 20)
    (expected,) = harness.run_chunks([chunk])

    def fail(*args: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "lay_out", fail)
        with pytest.raises(StepMemoryError):
            harness.run_chunks([chunk])
    assert harness.run_chunks([chunk]) == [expected]


def test_another_fault_is_no_lack_of_memory(model: Gemma3, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(model, ReferenceOps(CPU, torch.float32), block_size=4, num_tokens=80)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(runner_module, "lay_out", fail)
    with pytest.raises(RuntimeError, match="mat1"):
        harness.run_chunks([harness.chunk(TestSequence(random_prompt(20)), 20)])
