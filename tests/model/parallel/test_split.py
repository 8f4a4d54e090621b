"""Which part of a model each rank holds: parts fit together, and what cannot be divided is refused."""

import math
from dataclasses import replace

import pytest
import torch

from model.config.gemma3_config import SIZES, Gemma3Config
from model.config.tensors import EMBEDDING, HEAD, checkpoint_tensors, parameter_count
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import ceil_div
from model.parallel.layers import check_quantization
from model.parallel.split import Part, divided_config, possible_sizes
from model.precision import weight_bytes
from tests.model.tiny_models import CONFIG

SMALL = replace(CONFIG, tie_word_embeddings=False)


def test_published_sizes_divide_by_powers_of_two_up_to_their_query_heads() -> None:
    expected = {
        "270m": [1, 2, 4],
        "1b": [1, 2, 4],
        "4b": [1, 2, 4, 8],
        "12b": [1, 2, 4, 8, 16],
        "27b": [1, 2, 4, 8, 16, 32],
    }
    assert {name: possible_sizes(config) for name, config in SIZES.items()} == expected


def test_a_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 3 does not divide this model of 4 query heads.*1, 2, 4"
    ):
        divided_config(SIZES["1b"], 3)
    # Three KV heads on two ranks would leave one rank with half of a head's queries.
    assert possible_sizes(replace(CONFIG, num_attention_heads=12, num_key_value_heads=3)) == [1, 3, 6, 12]
    assert possible_sizes(replace(CONFIG, intermediate_size=50)) == [1, 2]


@pytest.mark.parametrize(("kv_heads", "expected"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_a_rank_holds_its_kv_heads_and_no_more(kv_heads: int, expected: int) -> None:
    config = replace(CONFIG, num_attention_heads=8, num_key_value_heads=kv_heads)
    divided = divided_config(config, 2)
    assert (divided.num_attention_heads, divided.num_key_value_heads) == (4, expected)
    whole, part = config.kv_cache_spec(16, 2), divided.kv_cache_spec(16, 2)
    assert part.bytes_per_token_per_layer == whole.bytes_per_token_per_layer * expected // kv_heads


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_parts_fit_together(kv_heads: int, size: int) -> None:
    config = replace(SMALL, num_key_value_heads=kv_heads)
    parts = [Part(config, 101, rank, size) for rank in range(size)]
    for number, spec in enumerate(checkpoint_tensors(config)):
        name = spec.name
        whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(number))
        pieces = [dict(part.tensors([(name, whole)]))[name] for part in parts]
        if "norm" in name:
            assert all(torch.equal(piece, whole) for piece in pieces)
        elif any(kind in name for kind in ("o_proj", "down_proj")):
            assert torch.equal(torch.cat(pieces, 1), whole)
        elif any(kind in name for kind in ("k_proj", "v_proj")):
            distinct = pieces[:: max(1, size // kv_heads)]
            assert torch.equal(torch.cat(distinct), whole)
        else:
            assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4)])
def test_every_query_head_stands_beside_the_kv_head_that_it_reads(kv_heads: int, size: int) -> None:
    config = replace(SMALL, num_key_value_heads=kv_heads)
    divided = divided_config(config, size)
    head_of_row = torch.arange(4).repeat_interleave(config.head_dim)[:, None]
    for rank in range(size):
        part = Part(config, 128, rank, size)
        queries = part.tensor("model.layers.0.self_attn.q_proj.weight", head_of_row)[
            :: config.head_dim, 0
        ].tolist()
        rows = part.tensor(
            "model.layers.0.self_attn.k_proj.weight", head_of_row[: kv_heads * config.head_dim]
        )
        keys = rows[:: config.head_dim, 0].tolist()
        group = divided.num_attention_heads // divided.num_key_value_heads
        read = [keys[i // group] for i in range(len(queries))]
        assert read == [query // (4 // kv_heads) for query in queries]


def test_every_row_of_the_vocabulary_has_one_rank_also_those_without_a_token() -> None:
    parts = [Part(SMALL, 101, rank, 4) for rank in range(4)]
    assert parts[0].widths == [26, 25, 25, 25]
    assert [row for part in parts for row in part.embedding_rows] == list(range(128))
    assert [row for rank in range(4) for row in parts[0].rows_of(rank)] == list(range(101))
    assert {EMBEDDING, HEAD} <= {spec.name for spec in checkpoint_tensors(SMALL)}


@pytest.mark.parametrize(("name", "size"), [("1b", 4), ("27b", 8)])
def test_the_weights_of_a_rank_are_counted(name: str, size: int) -> None:
    config = SIZES[name]
    part = Part(config, config.vocab_size, 0, size)
    tensors = checkpoint_tensors(config)
    counted = sum(part.tensor(spec.name, torch.empty(spec.shape, device="meta")).numel() for spec in tensors)
    norms = sum(math.prod(spec.shape) for spec in tensors if spec.role == "norm")

    def count(ranks: int) -> float:
        """Weights, by the bytes that they take in bfloat16 with norms in float32."""
        num_bytes = weight_bytes(
            divided_config(config, ranks),
            compute="bfloat16",
            quantization="none",
            device="cuda",
            has_kernels=False,
            vocabulary_rows=ceil_div(config.vocab_size, ranks),
            stored_types={},
        )
        return (num_bytes - 2 * norms) / 2

    assert count(size) == counted
    assert count(1) == parameter_count(config, tied=True)
    assert counted < parameter_count(config, tied=True) / size * 1.1 + ceil_div(config.hidden_size, 1)


@pytest.mark.parametrize(
    ("config", "quantization", "refused"),
    [
        (replace(CONFIG, intermediate_size=96), "int8", True),
        (replace(CONFIG, intermediate_size=96), "none", False),
        (replace(CONFIG, intermediate_size=96), "auto", False),
        (replace(CONFIG, intermediate_size=128), "int4", False),
        (
            replace(CONFIG, intermediate_size=48),
            "int4",
            False,
        ),  # 48 inputs have no whole groups of 32 on one device either
        (SIZES["1b"], "int4", False),
    ],
)
def test_a_division_that_cuts_groups_of_quantised_weights_is_refused(
    config: Gemma3Config, quantization: str, refused: bool
) -> None:
    if not refused:
        check_quantization(quantization, config, 2)
        return
    with pytest.raises(ConfigError, match=r"--quantization int8 .* --tensor-parallel-size 2 .*down"):
        check_quantization(quantization, config, 2)
