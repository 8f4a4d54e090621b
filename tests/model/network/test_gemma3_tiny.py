"""The network against transformers on tiny random checkpoints, and rules of the architecture that are checked
directly."""

from dataclasses import replace

import pytest
import torch

from model.config.gemma3_config import SIZES
from model.config.tensors import parameter_count
from model.interface.errors import CheckpointError
from model.network.gemma3 import Gemma3
from model.ops.reference import ReferenceOps
from model.ops.select import select_ops
from tests.model.harness import Harness, TestSequence, assert_close
from tests.model.tiny_models import (
    CONFIG,
    TINY_NAMES,
    all_local_config,
    expected_logits,
    load_tiny,
    random_model,
    random_prompt,
    random_tensors,
    reference_ops,
)

# Two float32 implementations that sum in different orders differ by about 1e-5 on logits of this size.
TOLERANCE = 1e-4


@pytest.mark.parametrize("backend", ["reference", "selected"])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_equal_those_of_transformers(name: str, backend: str) -> None:
    model = load_tiny(
        name, reference_ops() if backend == "reference" else select_ops(torch.device("cpu"), torch.float32)
    )
    token_ids, expected = expected_logits(name)
    assert len(token_ids) > 4 * model.config.sliding_window
    logits = Harness(model, model.ops, block_size=8, num_tokens=64).all_logits(token_ids)
    assert_close(logits, expected, TOLERANCE)


@pytest.mark.parametrize("name", ["mqa_layer_types", "rope_parameters_scalar_168"])
def test_logits_equal_those_of_transformers_token_by_token(name: str) -> None:
    model = load_tiny(name)
    token_ids, expected = expected_logits(name)
    harness = Harness(model, model.ops, block_size=4, num_tokens=64)
    assert_close(harness.all_logits(token_ids, 1), expected, TOLERANCE)
    assert harness.recycled > 5


def test_rotary_scaling_of_the_global_layers_leaves_local_layers_alone() -> None:
    """Case 6: base 1e6 and positions divided by 8 on global layers, base 1e4 and no scaling on local ones."""
    ops = ReferenceOps(torch.device("cpu"), torch.float32)
    model = Gemma3(replace(SIZES["4b"], num_hidden_layers=1, global_layers=(False,)), ops, 10)
    positions = torch.tensor([0, 7, 4096])
    half = SIZES["4b"].head_dim // 2
    angles_of = model.rotary(positions)
    for is_global, theta, factor in ((True, 1e6, 8.0), (False, 1e4, 1.0)):
        exponents = torch.arange(half, dtype=torch.float64) / half
        angles = positions[:, None].double() / factor * theta**-exponents
        cos, sin = angles_of[is_global]
        # float32 angles of up to 4096 radians carry an error of 4096 * 2^-24
        assert_close(cos.double(), angles.cos(), 5e-4)
        assert_close(sin.double(), angles.sin(), 5e-4)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 640**0.5), (torch.bfloat16, 25.25)])
def test_embedding_is_scaled_by_the_factor_rounded_to_the_compute_dtype(
    dtype: torch.dtype, factor: float
) -> None:
    """Case 2: 25.25 in bfloat16, sqrt(640) in float32; the tied head uses the unscaled matrix."""
    config = replace(all_local_config(), hidden_size=640)
    model = random_model(config, dtype=dtype)
    with torch.inference_mode():
        model.embedding.weight[5, :] = 1.0
    embedded = model.embedding(torch.tensor([5]))
    assert embedded.dtype == dtype
    assert embedded[0, 0].item() == pytest.approx(factor, rel=1e-7)
    hidden = torch.zeros(1, 640, dtype=dtype)
    hidden[0, 3] = 1.0
    torch.testing.assert_close(model.logits(hidden)[0], model.embedding.weight[:, 3].float(), rtol=0, atol=0)


def test_local_window_holds_exactly_w_keys() -> None:
    window = 8
    model = random_model(all_local_config(window=window))
    harness = Harness(model, model.ops, block_size=4, num_tokens=64)
    tokens = random_prompt(24)
    logits = harness.all_logits(tokens)
    for position in (window, 15, 23):
        for distance, matters in ((window, False), (window - 1, True)):
            changed = list(tokens)
            changed[position - distance] = tokens[position - distance] % 100 + 5
            difference = (harness.all_logits(changed)[position] - logits[position]).abs().max()
            assert bool(difference > 1e-3) == matters, (position, distance, difference)
            if not matters:
                assert difference == 0.0


def test_global_layers_see_the_first_token_from_anywhere() -> None:
    config = replace(all_local_config(window=8), global_layers=(True,))
    model = random_model(config)
    harness = Harness(model, model.ops, block_size=4, num_tokens=64)
    tokens = random_prompt(40)
    changed = [tokens[0] + 1, *tokens[1:]]
    assert (harness.all_logits(tokens)[39] - harness.all_logits(changed)[39]).abs().max() > 1e-3


def test_rows_of_the_head_without_a_token_are_not_part_of_the_logits() -> None:
    """Case 12: a head of more rows than the tokenizer has tokens, one of the surplus rows huge."""
    config = replace(CONFIG, vocab_size=160)
    with torch.inference_mode():
        model = Gemma3(config, ReferenceOps(torch.device("cpu"), torch.float32), 150)
        tensors = random_tensors(model)
        tensors["model.embed_tokens.weight"][155] *= 1e4
        model.load_weights(tensors.items())
    harness = Harness(model, model.ops, block_size=16, num_tokens=64)
    assert harness.all_logits(random_prompt(10)).shape == (10, 150)
    sequence = TestSequence(random_prompt(10))
    for _ in range(8):
        (result,) = harness.run([(sequence, len(sequence.tokens) - sequence.num_computed)])
        assert result.token_ids[0] < 150
        sequence.tokens.append(result.token_ids[0])


def test_loading_names_what_is_wrong() -> None:
    config = all_local_config()

    def load(tensors: dict[str, torch.Tensor]) -> None:
        Gemma3(config, ReferenceOps(torch.device("cpu"), torch.float32), config.vocab_size).load_weights(
            tensors.items()
        )

    good = random_tensors(Gemma3(config, ReferenceOps(torch.device("cpu"), torch.float32), config.vocab_size))
    load(good)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match="up_proj"):
        load({key: value for key, value in good.items() if key != name})
    with pytest.raises(CheckpointError, match="surprise"):
        load({**good, "model.surprise.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="up_proj"):
        load({**good, name: good[name].T.contiguous()})


def test_weight_bytes_count_a_tied_head_once() -> None:
    model = random_model()
    norms = sum(slot.shape[0] for slot in model.weight_slots().values() if len(slot.shape) == 1)
    # The factors of the norms are float32 in every dtype.
    assert model.weight_bytes == parameter_count(CONFIG, tied=True) * 4
    assert (
        random_model(dtype=torch.bfloat16).weight_bytes
        == (parameter_count(CONFIG, tied=True) - norms) * 2 + norms * 4
    )


@pytest.mark.parametrize("size", SIZES)
def test_networks_of_all_published_sizes_have_the_right_weights(size: str) -> None:
    """Built on the meta device: no memory, however large."""
    config = SIZES[size]
    model = Gemma3(config, ReferenceOps(torch.device("cpu"), torch.bfloat16), config.vocab_size)
    count = 0
    for slot in model.weight_slots().values():
        elements = 1
        for extent in slot.shape:
            elements *= extent
        count += elements
    assert count == parameter_count(config, tied=True)
