"""How far a setting's next-token distributions are from float32's, on real text: ``python -m
server.bench.quality``.

The text is the reference documentation of Python that every CPython carries (``pydoc_data.topics``), so the
figures can be repeated anywhere. For each position both models see the same tokens before it; compared are
the mean Kullback-Leibler divergence from float32 (nats per token), how often the likeliest token is the same,
and the perplexity of the text.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics

import torch

from model.checkpoint.open import open_checkpoint
from model.execution.runner import ModelRunner
from model.interface.sequence_chunk import StepInput
from server.text.tokenizer import Tokenizer

LENGTH = 1024  # tokens of one sequence, <bos> included
ROWS = 128  # rows of logits compared at once: 128 MiB of float32 for each model


@dataclass(slots=True)
class Quality:
    """Sums over positions; the properties are the figures."""

    setting: str
    num_tokens: int = 0
    kl_sum: float = 0.0
    num_agreed: int = 0
    nll_sum: float = 0.0
    reference_nll_sum: float = 0.0

    @property
    def mean_kl(self) -> float:
        return self.kl_sum / self.num_tokens

    @property
    def top1_agreement(self) -> float:
        return self.num_agreed / self.num_tokens

    @property
    def perplexity_ratio(self) -> float:
        return float(torch.tensor((self.nll_sum - self.reference_nll_sum) / self.num_tokens).exp())

    @property
    def reference_perplexity(self) -> float:
        return float(torch.tensor(self.reference_nll_sum / self.num_tokens).exp())

    def add(self, reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits float32 [r, V] of both, and the tokens that follow, int64 [r]."""
        expected, got = reference.log_softmax(-1), logits.log_softmax(-1)
        self.num_tokens += len(targets)
        self.kl_sum += float((expected.exp() * (expected - got)).sum(dtype=torch.float64))
        self.num_agreed += int((reference.argmax(-1) == logits.argmax(-1)).sum())
        self.nll_sum -= float(got.gather(1, targets[:, None]).sum(dtype=torch.float64))
        self.reference_nll_sum -= float(expected.gather(1, targets[:, None]).sum(dtype=torch.float64))


def text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def sequences(tokenizer: Tokenizer, num_tokens: int) -> Iterator[list[int]]:
    """Pieces of the text, each after <bos>, with at least ``num_tokens`` predicted positions in all."""
    token_ids = tokenizer.encode_plain(text())
    for first in range(0, num_tokens, LENGTH - 1):
        yield [tokenizer.bos_token_id, *token_ids[first : first + LENGTH - 1]]


def load(model: str | None, dtype: str, quantization: str) -> ModelRunner:
    checkpoint = open_checkpoint(model)
    runner = ModelRunner.load(checkpoint, dtype=dtype, device="cpu", quantization=quantization)
    checkpoint.close()
    spec = runner.spec
    blocks = LENGTH // spec.block_size + 1
    memory = (
        2 * (blocks + 1) * spec.global_block_bytes
        + spec.local_pool_blocks(1, LENGTH) * spec.local_block_bytes
    )
    runner.allocate_cache(
        spec.plan(
            memory, max_num_seqs=1, max_num_batched_tokens=LENGTH, max_model_len=LENGTH, prefix_caching=False
        )
    )
    return runner


@torch.inference_mode()
def compare(reference: ModelRunner, others: list[tuple[Quality, ModelRunner]], token_ids: list[int]) -> None:
    """Adds a sequence's positions to the figures of every setting."""
    table = list(range(1, len(token_ids) // reference.spec.block_size + 2))
    step = StepInput.of_prompt(token_ids, table)
    expected = reference.hidden_states(step)
    hidden = [runner.hidden_states(step) for _, runner in others]
    targets = torch.tensor(token_ids[1:])
    for first in range(0, len(targets), ROWS):
        rows = slice(first, min(first + ROWS, len(targets)))
        logits = reference.model.logits(expected[rows])
        for (quality, runner), states in zip(others, hidden, strict=True):
            quality.add(logits, runner.model.logits(states[rows]), targets[rows])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m server.bench.quality", description="Compare settings with float32."
    )
    parser.add_argument("model", nargs="?", help="Folder or .gguf file; the demo model by default.")
    parser.add_argument(
        "--settings", nargs="+", default=["auto:auto"], metavar="DTYPE:QUANTIZATION", help="What to compare."
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments.model)
    config = checkpoint.config
    tokenizer = Tokenizer.from_file(
        checkpoint.tokenizer_file,
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        chat_template=None,
    )
    checkpoint.close()
    reference = load(arguments.model, "float32", "none")
    others = []
    for setting in arguments.settings:
        dtype, _, quantization = setting.partition(":")
        others.append((Quality(setting), load(arguments.model, dtype, quantization or "auto")))
    rows = [quality for quality, _ in others]
    began = time.monotonic()
    for token_ids in sequences(tokenizer, arguments.tokens):
        compare(reference, others, token_ids)
        print(f"{rows[0].num_tokens} tokens, {time.monotonic() - began:.0f} s", file=sys.stderr)
    figures = [
        {
            **asdict(quality),
            "mean_kl": quality.mean_kl,
            "top1_agreement": quality.top1_agreement,
            "perplexity_ratio": quality.perplexity_ratio,
            "reference_perplexity": quality.reference_perplexity,
        }
        for quality in rows
    ]
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    print(f"{'setting':<20}{'tokens':>8}{'KL, nats/token':>16}{'top-1 agrees':>14}{'perplexity':>12}")
    for quality in rows:
        print(
            f"{quality.setting:<20}{quality.num_tokens:>8}{quality.mean_kl:>16.5f}{quality.top1_agreement:>14.2%}"
            f"{quality.perplexity_ratio - 1:>+12.2%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
