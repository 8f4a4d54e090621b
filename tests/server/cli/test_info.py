"""``gemserve info``: the published parameter counts, and a plan that adds up."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.host.memory import available_memory
from server.__main__ import main
from server.loading.memory_plan import default_kv_cache_memory, format_bytes
from tests.tiny import write_tiny_folder


def info(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["info", *arguments, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_270m_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    values = info(capsys, "270m", "--dtype", "bfloat16", "--kv-cache-memory", "2GiB")
    assert values["parameters_tied"] == 268_098_176
    assert values["parameters_untied"] == 435_870_336
    assert values["layer_map"] == "LLLLLG LLLLLG LLLLLG"
    assert values["kv_bytes_per_token_global"] == 3 * 1024
    assert values["kv_bytes_per_token_all_layers"] == 18 * 1024
    assert values["global_bytes"] + values["local_bytes"] <= 2 << 30
    assert values["capacity_tokens"] == (values["global_blocks"] - 1) * 16


@pytest.mark.parametrize(
    ("flags", "num_bytes"),
    [
        (("--dtype", "float32"), 4),
        (("--dtype", "float32", "--quantization", "int8"), 2),
        (("--dtype", "float32", "--quantization", "int8", "--device", "cuda"), 4),
        (("--quantization", "auto"), 2),
    ],
)
def test_the_cache_of_a_cpu_is_bfloat16_beside_rounded_weights(
    flags: tuple[str, ...], num_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    values = info(capsys, "270m", "--kv-cache-memory", "2GiB", *flags)
    assert values["kv_bytes_per_token_per_layer"] == 2 * 256 * num_bytes


def test_requests_that_fit_follow_from_the_global_pool(capsys: pytest.CaptureFixture[str]) -> None:
    values = info(
        capsys,
        "270m",
        "--dtype",
        "bfloat16",
        "--kv-cache-memory",
        "1GiB",
        "--max-num-seqs",
        "32",
        "--no-prefix-caching",
    )
    for length in (1024, 8192, 32768):
        expected = min(32, (values["global_blocks"] - 1) // (length // 16))
        assert values["requests_that_fit"][str(length)] == expected
    assert values["requests_that_fit"]["32768"] >= 1


def test_the_text_names_every_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "270m", "--kv-cache-memory", "3GiB", "--max-model-len", "8192"]) == 0
    text = capsys.readouterr().out
    for part in (
        "268,098,176",
        "435,870,336",
        "LLLLLG",
        "weights",
        "global pool",
        "local pool",
        "1k: 64",
        "max_model_len 8,192",
    ):
        assert part in text
    assert "32k: longer than max_model_len" in text


def test_a_model_beyond_this_machine_is_still_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "27b", "--max-num-seqs", "2000", "--max-num-batched-tokens", "2000", "--json"]) == 0
    captured = capsys.readouterr()
    assert "too little memory" in captured.err
    assert json.loads(captured.out)["max_model_len"] == 131_072


def test_devices_that_share_a_model_are_counted_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("4b", "--dtype", "bfloat16", "--kv-cache-memory", "10GiB", "--no-prefix-caching")
    whole, part = info(capsys, *flags), info(capsys, *flags, "--tensor-parallel-size", "4")
    assert part["tensor_parallel_size"] == 4
    assert part["weight_bytes"] == pytest.approx(whole["weight_bytes"] / 4, rel=0.01)
    assert part["kv_bytes_per_token_global"] * 4 == whole["kv_bytes_per_token_global"]
    assert part["capacity_tokens"] > 3 * whole["capacity_tokens"]
    assert main(["info", *flags, "--tensor-parallel-size", "4"]) == 0
    assert "4 share the model; weights and cache are those of each" in capsys.readouterr().out
    assert main(["info", *flags, "--tensor-parallel-size", "5"]) == 1
    assert "--tensor-parallel-size 5 does not divide this model" in capsys.readouterr().err


def test_a_cache_that_is_too_small_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "270m", "--kv-cache-memory", "1MiB"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gemserve: error: --kv-cache-memory")
    assert "--max-num-seqs" in error


def test_default_budget_and_formats() -> None:
    assert available_memory() > 0
    assert default_kv_cache_memory(1000) == 500
    assert [format_bytes(size) for size in (512, 3072, 5 << 20, 3 << 30)] == [
        "512 B",
        "3 KiB",
        "5 MiB",
        "3.00 GiB",
    ]


def test_the_layouts_in_the_docs_are_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parents[3] / "docs" / "kv-cache.md").read_text()
    (command,) = [
        line.split() for line in document.splitlines() if line.startswith("    gemserve info --layouts")
    ]
    assert main(command[1:]) == 0
    assert f"```\n{capsys.readouterr().out}```" in document


def test_two_pools_against_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--layouts", "--json"]) == 0
    rows = {row["size"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["270m", "1b", "4b", "12b", "27b"]
    assert 5.6 < rows["4b"]["ratio"] < 5.9
    assert rows["4b"]["hybrid_fit"] > 5.8 * rows["4b"]["uniform_fit"]


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("auto", "auto"), ("float32", "int8"), ("bfloat16", "int4"), ("auto", "none")]
)
def test_weights_and_cache_are_those_of_the_loaded_model(
    dtype: str, quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within what kernels add to a weight: 1 %. Exact where weights are kept as they are."""
    from model.checkpoint.open import open_checkpoint
    from model.execution.runner import ModelRunner

    flags = ("--dtype", dtype, "--quantization", quantization, "--device", "cpu", "--kv-cache-memory", "2GiB")
    values = info(capsys, *flags)
    checkpoint = open_checkpoint(None, progress=False)
    runner = ModelRunner.load(
        checkpoint, dtype=dtype, quantization=quantization, device="cpu", block_size=16, progress=False
    )
    checkpoint.close()
    assert values["weight_bytes"] == pytest.approx(runner.weight_bytes, rel=0.01)
    if quantization == "none":
        assert values["weight_bytes"] == runner.weight_bytes
    assert values["dtype"] == runner.dtype
    assert values["kv_bytes_per_token_per_layer"] == 2 * 256 * runner.ops.cache_dtype.itemsize


def test_weights_of_a_checkpoint_of_ours_in_bfloat16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from model.checkpoint.open import open_checkpoint
    from model.execution.runner import ModelRunner

    folder = write_tiny_folder(tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        values = info(capsys, str(folder), "--dtype", dtype, "--kv-cache-memory", "64MiB")
        checkpoint = open_checkpoint(str(folder), progress=False)
        runner = ModelRunner.load(checkpoint, dtype=dtype, device="cpu", block_size=16, progress=False)
        checkpoint.close()
        assert values["weight_bytes"] == runner.weight_bytes
