"""The benchmark of the GPU: its program runs here on a tiny model, and prints its tables where there is
nothing to measure."""

import pytest
import torch

from model.bench import gpu as bench_gpu
from model.bench.contexts import decode_step, plan_for
from model.bench.gpu import BENCHED, TINY, Bench, Card, main, prefill_work, random_runner
from model.bench.step import decode_work
from model.config.gemma3_config import SIZES
from model.config.tensors import parameter_count
from model.interface.kv_cache_spec import KVCachePlan
from model.interface.running_batch import GLOBAL, LOCAL
from model.interface.sampling_params import SamplingParams

CPU = torch.device("cpu")
QUICK = [
    "--budget",
    "0",
    "--sizes",
    "tiny",
    "--sequences",
    "1",
    "3",
    "--contexts",
    "40",
    "200",
    "--prefill-tokens",
    "100",
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_tiny_model_is_measured_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CPU: ")
    rows = [cells(line) for line in printed.splitlines() if line.startswith("| tiny")]
    assert [row[:2] for row in rows[:2]] == [["tiny", "1"], ["tiny", "3"]]
    assert len(rows) == 3
    for text in (*rows[0][2:], *rows[1][2:], *rows[2][1:]):
        measured, floor = (float(number.replace(",", "")) for number in text.split(" (")[0].split(" / "))
        assert min(measured, floor) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_every_cell_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    rows = [
        cells(line)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(tuple(f"| {s.upper()}" for s in BENCHED))
    ]
    assert len(rows) == 5 * 5 + 5
    assert [row[0] for row in rows[::5][:5]] == ["270M", "1B", "4B", "12B", "27B"]
    assert all(cell == "not measured" for row in rows[:25] for cell in row[2:])
    assert all(cell == "not measured" for row in rows[25:] for cell in row[1:])


def test_what_does_not_fit_is_skipped_and_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TINY.kv_cache_spec(16, 4)
    smaller, larger = (plan_for(spec, 3, context) for context in (40, 3000))
    weights = parameter_count(TINY, tied=True) * 4
    room = max(weights, smaller.global_bytes + smaller.local_bytes) + 1000
    assert larger.global_bytes + larger.local_bytes > room
    monkeypatch.setattr(Bench, "room", lambda self: room)
    assert main(["--device", "cpu", "--dtype", "float32", *QUICK, "--contexts", "40", "3000"]) == 0
    row = next(cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny | 3"))
    assert "does not fit" not in row[2]
    assert row[3] == "does not fit"
    monkeypatch.setattr(Bench, "room", lambda self: weights - 1)
    assert main(["--device", "cpu", "--dtype", "float32", *QUICK]) == 0
    assert capsys.readouterr().out.count("does not fit (weights)") == 2 * 2 + 1


def test_a_setting_that_does_not_work_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--quantization", "fp8", *QUICK]) == 1
    assert capsys.readouterr().err.startswith("error: --quantization fp8")


def test_the_cache_of_a_decode_step_is_exactly_what_its_blocks_need() -> None:
    runner = random_runner(TINY, CPU, torch.float32, "none")
    for num_seqs, context in ((1, 1), (2, 64), (3, 65), (2, 333)):
        batch = decode_step(runner, num_seqs, context, SamplingParams(max_tokens=1)).batch
        plan = plan_for(runner.spec, num_seqs, context)
        for blocks, tables in (
            (plan.num_global_blocks, batch.blocks[GLOBAL].tolist()),
            (plan.num_local_blocks, batch.blocks[LOCAL].tolist()),
        ):
            used = [block for table in tables for block in table if block]
            assert sorted(used) == list(range(1, blocks))


def test_the_floors_count_what_a_step_must_do() -> None:
    runner = random_runner(TINY, CPU, torch.float32, "none")
    config = TINY
    # the embedding is only looked up
    matrices = parameter_count(config, tied=False) - config.vocab_size * config.hidden_size
    norms = config.num_hidden_layers * (4 * config.hidden_size + 2 * config.head_dim) + config.hidden_size
    per_token = runner.spec.bytes_per_token_per_layer
    read = sum(part[0] for part in decode_work(runner, 3, 200).values())
    assert read == (matrices - norms) * 4 + 3 * per_token * (1 * 200 + 6 * 64)
    operations = sum(part[1] for part in prefill_work(runner, 100).values())
    head = config.vocab_size * config.hidden_size
    pairs_global, pairs_local = sum(range(1, 101)), sum(min(position, 64) for position in range(1, 101))
    heads = config.num_attention_heads * config.head_dim
    assert operations == 2 * 100 * (matrices - norms - head) + 2 * head + 4 * heads * (
        pairs_global + 6 * pairs_local
    )
    assert Card("", 10.0, 100.0).floor({"a": (20.0, 100.0), "b": (10.0, 500.0)}) == 2.0 + 5.0


def test_every_published_size_is_benched() -> None:
    assert set(BENCHED) == set(SIZES)
    assert isinstance(plan_for(SIZES["27b"].kv_cache_spec(16, 2), 256, 32768), KVCachePlan)
    assert bench_gpu.build_parser().parse_args([]).sizes == list(BENCHED)
