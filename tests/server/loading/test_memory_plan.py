"""What fits into a budget, for a model that is not loaded."""

import pytest

from model.config.gemma3_config import SIZES
from model.interface.kv_cache_spec import KVCacheSpec
from server.loading.layouts import as_dicts, as_text, compare_layouts, hybrid_fit
from server.loading.memory_plan import (
    effective_max_model_len,
    format_bytes,
    layer_map,
    make_report,
    requests_that_fit,
)

CONFIG = SIZES["270m"]
SPEC = CONFIG.kv_cache_spec(16, 2)


def test_the_longest_sequence_is_the_least_of_its_limits() -> None:
    plan = SPEC.plan_of_blocks(101, 1000)
    assert effective_max_model_len(CONFIG, plan, None) == 1600
    assert effective_max_model_len(CONFIG, plan, 500) == 500
    roomy = SPEC.plan_of_blocks(10**6, 1000)
    assert effective_max_model_len(CONFIG, roomy, None) == CONFIG.max_position_embeddings


def test_the_global_pool_decides_how_many_fit() -> None:
    plan = SPEC.plan_of_blocks(1 + 3 * 64, 10_000)
    assert requests_that_fit(SPEC, plan, 1024, 256) == 3
    assert requests_that_fit(SPEC, plan, 1025, 256) == 2
    assert requests_that_fit(SPEC, plan, 1024, 2) == 2
    local_only = KVCacheSpec(16, 512, 0, 18, 1024)
    assert requests_that_fit(local_only, local_only.plan_of_blocks(1, 100), 1024, 7) == 7


def test_so_many_fit_and_not_one_more() -> None:
    budget = 1 << 30
    count = hybrid_fit(SPEC, budget, 8192, 2048)

    def bytes_of(num_sequences: int) -> int:
        global_blocks = 1 + num_sequences * SPEC.blocks(8192).global_blocks
        local_blocks = SPEC.local_pool_blocks(num_sequences, 2048)
        return global_blocks * SPEC.global_block_bytes + local_blocks * SPEC.local_block_bytes

    assert bytes_of(count) <= budget < bytes_of(count + 1)


def test_every_size_keeps_less_than_every_token() -> None:
    rows = compare_layouts(8 << 30, 32768, block_size=16, dtype_size=2, max_num_batched_tokens=2048)
    assert [row.size for row in rows] == list(SIZES)
    assert all(row.ratio > 1 and row.hybrid_fit >= row.uniform_fit for row in rows)
    assert as_text(rows, 8 << 30, 32768).count("\n") == len(rows) + 1
    assert [row["size"] for row in as_dicts(rows)] == list(SIZES)


def test_a_report_is_the_same_as_text_and_as_values() -> None:
    plan = SPEC.plan(
        1 << 30, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4096, prefix_caching=True
    )
    report = make_report(
        CONFIG,
        SPEC,
        plan,
        name="tiny",
        weight_bytes=5 << 20,
        weight_format="Q4_0",
        dtype="int8",
        max_num_seqs=8,
        max_model_len=4096,
    )
    assert report.as_dict()["max_model_len"] == 4096
    assert "5 MiB in int8" in report.text()
    assert "32k: longer than max_model_len" in report.text()
    assert "devices" not in report.text()


def test_layers_are_shown_in_groups_of_six() -> None:
    assert layer_map(CONFIG) == "LLLLLG LLLLLG LLLLLG"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 20, "3 MiB"), (5 << 30, "5.00 GiB")],
)
def test_sizes_are_shown_in_units(size: int, text: str) -> None:
    assert format_bytes(size) == text
