"""The account of a device's memory: what is measured before the cache gets the rest, and errors that name
what to change."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from model.execution import device_memory
from model.execution.device_memory import MemoryProfile, largest_steps, profile_cuda_memory, profile_memory
from model.execution.out_of_memory import remedy
from model.execution.runner import ModelRunner
from model.interface.errors import ConfigError
from model.interface.running_batch import RunningBatch
from model.interface.sequence_chunk import ChunkResult, StepInput, StepMemoryError, StepResult
from model.network.gemma3 import Gemma3
from model.ops.reference import ReferenceOps
from model.ops.select import select_ops
from server.loading.load import cache_budget, captures_graphs
from server.settings.settings import Settings
from tests.model.graphs import RerunDevice
from tests.model.tiny_models import random_model
from tests.steps import sequences_of

CPU = torch.device("cpu")
MIB = 1 << 20
LIMITS: dict[str, int] = {"max_num_batched_tokens": 48, "max_num_seqs": 20, "max_model_len": 200}


@pytest.fixture(scope="module")
def model() -> Gemma3:
    return random_model()


def make_runner(model: Gemma3) -> ModelRunner:
    return ModelRunner(model, model.config.kv_cache_spec(8, 4), model.ops)


class StubMemory:
    """A device of 1000 MiB: 100 of them weights, 30 the driver's; tests add to what is taken."""

    def __init__(self) -> None:
        self.in_tensors = 100 * MIB
        self.kept = 0  # by the process, for later tensors
        self.outside = 30 * MIB
        self.highest = 0

    def total(self) -> int:
        return 1000 * MIB

    def free(self) -> int:
        return self.total() - self.in_tensors - self.kept - self.outside

    def allocated(self) -> int:
        return self.in_tensors

    def peak(self) -> int:
        return self.highest

    def reset_peak(self) -> None:
        self.highest = self.in_tensors

    def release(self) -> None:
        self.kept = 0


class Steps:
    """Runs the runner's steps, and lets each take memory as a device would."""

    def __init__(self, runner: ModelRunner, memory: StubMemory, taken: Callable[[StepInput], int]) -> None:
        self.results: list[ChunkResult] = []
        run = runner.run

        def counted(step: StepInput) -> StepResult:
            memory.highest = max(memory.highest, memory.in_tensors + taken(step))
            memory.kept += taken(step)  # until it is released
            result = run(step)
            self.results += result.all()
            return result

        runner.run = counted  # type: ignore[method-assign]  # of this one object


def test_weights_activations_and_what_else_is_there(model: Gemma3) -> None:
    runner, memory = make_runner(model), StubMemory()
    steps = Steps(runner, memory, lambda step: 2 * MIB * step.num_tokens)
    profile = profile_memory(runner, memory, None, **LIMITS)
    assert profile == MemoryProfile(
        total=1000 * MIB, weights=100 * MIB, activations=96 * MIB, graphs=0, other=30 * MIB
    )
    assert profile.cache_bytes(0.9) == (900 - 100 - 96 - 30) * MIB
    assert runner.cache is None
    assert all(result.error is None and len(result.token_ids) == 1 for result in steps.results)


def test_the_largest_steps_are_what_the_settings_allow(model: Gemma3) -> None:
    runner = make_runner(model)
    mixed, decodes = (sequences_of(step) for step in largest_steps(runner, **LIMITS))
    assert sum(len(chunk.token_ids) for chunk in mixed) == 48
    assert len(mixed) == len(decodes) == 20
    for chunk in (*mixed, *decodes):
        assert chunk.samples
        assert chunk.start + len(chunk.token_ids) == 200
        first = max(0, chunk.start // 8 * 8 - 63) // 8  # as the cache keeps them, from the last full block
        assert chunk.local_block_table == [0] * first + [1] * (25 - first)
    step, _ = largest_steps(runner, max_num_batched_tokens=512, max_num_seqs=1, max_model_len=100)
    (alone,) = step.prefills
    assert len(alone.token_ids) == 100
    step, _ = largest_steps(runner, max_num_batched_tokens=512, max_num_seqs=20, max_model_len=100)
    short = step.prefills
    assert [len(chunk.token_ids) for chunk in short] == [100] * 4 + [97] + [1] * 15, (
        "one sequence does not fill a step"
    )
    assert sum(len(chunk.token_ids) for chunk in short) == 512


def test_graphs_are_the_pool_of_the_largest_and_as_much_for_each_other_as_for_the_second(
    model: Gemma3,
) -> None:
    runner, memory = make_runner(model), StubMemory()
    device = RerunDevice()
    capture = device.capture

    def capture_and_take(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        memory.outside += 40 * MIB if not device.captured else 3 * MIB
        return capture(step)

    device.capture = capture_and_take  # type: ignore[method-assign]
    profile = profile_memory(runner, memory, device, **LIMITS)
    assert device.captured == [24, 16]  # of 24, 16, 8, 4, 2, 1
    assert profile.graphs == (40 + 5 * 3) * MIB
    assert runner._graphs is None


def test_nothing_left_is_an_error_that_names_the_settings() -> None:
    profile = MemoryProfile(24 << 30, weights=20 << 30, activations=1 << 30, graphs=1 << 29, other=1 << 30)
    assert profile.cache_bytes(1.0) == 3 << 29
    with pytest.raises(ConfigError) as error:
        profile.cache_bytes(0.9)
    for text in (
        "--gpu-memory-utilization 0.9 of 24.0 GiB",
        "weights 20.00 GiB",
        "--max-num-batched-tokens",
        "--quantization",
    ):
        assert text in str(error.value)


def test_a_step_that_does_not_fit_names_the_settings(model: Gemma3) -> None:
    runner = make_runner(model)

    def run(step: StepInput) -> StepResult:
        raise StepMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    runner.run = run  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=r"no room for its largest step.*--max-num-batched-tokens, --max-num-seqs"
    ):
        profile_memory(runner, StubMemory(), None, **LIMITS)


def test_weights_and_graphs_that_do_not_fit_name_the_settings(model: Gemma3) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    checkpoint = SimpleNamespace(
        config=model.config, tensors=lambda: iter([("model.norm.weight", Unreadable())])
    )

    class Unreadable:
        shape = (model.config.hidden_size,)
        to = no_memory

    with pytest.raises(ConfigError, match=r"no room for the weights\. Choose --quantization"):
        ModelRunner.load(cast(Any, checkpoint), device="cpu", dtype="float32", block_size=8, progress=False)
    runner, device = make_runner(model), RerunDevice()
    runner.allocate_cache(
        runner.spec.plan(
            MIB, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, prefix_caching=False
        )
    )
    device.capture = no_memory  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match=r"no room for the CUDA graphs.*--no-cuda-graphs"):
        runner.capture_graphs((1, 2), 64, device)


def test_other_faults_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="an illegal memory access"), remedy("it", "Buy more."):
        raise RuntimeError("an illegal memory access was encountered")


def test_where_the_budget_of_the_cache_comes_from(model: Gemma3, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(model)
    assert cache_budget(Settings(kv_cache_memory="1GiB"), runner) == (1 << 30, "--kv-cache-memory")  # type: ignore[arg-type]
    assert profile_cuda_memory(runner, **LIMITS, cuda_graphs=True) is None
    budget, setting = cache_budget(Settings(), runner)
    assert setting == "--kv-cache-memory"
    assert budget == pytest.approx(runner.free_memory() / 2, rel=0.5)
    asked: dict[str, object] = {}

    def profile(runner: ModelRunner, **limits: object) -> MemoryProfile:
        asked.update(limits)
        return MemoryProfile(1000, 100, 50, 20, 30)

    monkeypatch.setattr(device_memory, "profile_cuda_memory", profile)
    settings = Settings(max_model_len=1 << 30, max_num_seqs=7, gpu_memory_utilization=0.5, cuda_graphs=False)
    assert cache_budget(settings, runner) == (300, "--gpu-memory-utilization")
    expected = {"max_num_batched_tokens": 512, "max_num_seqs": 7, "max_model_len": 4096, "cuda_graphs": False}
    assert asked == expected  # no longer than the model's positions
    with pytest.raises(ConfigError, match=r"^--gpu-memory-utilization gives the KV cache 300 bytes, too few"):
        runner.spec.plan(
            300,
            max_num_seqs=7,
            max_num_batched_tokens=512,
            max_model_len=64,
            prefix_caching=True,
            setting="--gpu-memory-utilization",
        )


def test_ranks_that_share_a_model_get_no_graphs() -> None:
    assert captures_graphs(Settings())
    assert not captures_graphs(Settings(cuda_graphs=False))
    shared = cast(Settings, SimpleNamespace(cuda_graphs=True, tensor_parallel_size=2))
    assert not captures_graphs(shared)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_has_room_for_what_the_profile_leaves() -> None:
    ops = select_ops(torch.device("cuda"), torch.bfloat16)
    assert not isinstance(ops, ReferenceOps) or ops.device.type == "cuda"
    with torch.inference_mode():
        model = Gemma3(random_model().config, ops, 128)
        model.load_weights(
            (name, torch.randn(slot.shape, dtype=torch.bfloat16) * 0.1)
            for name, slot in model.weight_slots().items()
        )
    runner = make_runner(model)
    profile = profile_cuda_memory(runner, **LIMITS, cuda_graphs=True)
    assert profile is not None
    assert min(profile.weights, profile.activations, profile.other) > 0
    budget = profile.cache_bytes(0.9)
    assert 0 < budget < profile.total
    runner.allocate_cache(
        runner.spec.plan(
            budget, max_num_seqs=20, max_num_batched_tokens=48, max_model_len=200, prefix_caching=True
        )
    )
    runner.capture_graphs((8, 16), 200)
    assert len(runner.run(StepInput(RunningBatch(1, 1)))) == 0
