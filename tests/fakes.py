"""A model without weights for tests above it: a deterministic runner and a tokenizer of 512 tokens with
Gemma's control tokens and byte fallback, put together as the engine the server would load."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from model.interface.grammar_state import GrammarFault
from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import (
    NOT_FINITE,
    ChunkResult,
    StepInput,
    StepMemoryError,
    StepResult,
    TokenLogprobs,
)
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.scheduler.scheduler import SchedulerConfig
from server.grammar.compiler import GrammarCompiler
from server.loading.load import LoadedEngine
from server.settings.settings import Settings
from server.text.tokenizer import Tokenizer
from tests.steps import StepSequence, sequences_of

VOCAB_SIZE = 512
HIDDEN_SIZE = 4
PAD, EOS, BOS, UNK, START_OF_TURN, END_OF_TURN = 0, 1, 2, 3, 105, 106
FIRST_BYTE = 120
FIRST_TEXT = FIRST_BYTE + 256
# Runs of these tokens in a prompt tell the runner to fail, see FakeRunner.
HUNGRY, HANG, CRASH, POISON = 96, 97, 98, 99

_WORDS = ["▁the", "▁Paris", "▁is", "▁a", "ing", "▁10", "11", "▁né", "▁—", "▁日本", "ed", "▁and"]
_CHARACTERS = [*"▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"-()/<>_"]


def fake_tokenizer(chat_template: str | None = None) -> Tokenizer:
    control = {
        PAD: "<pad>",
        EOS: "<eos>",
        BOS: "<bos>",
        UNK: "<unk>",
        START_OF_TURN: "<start_of_turn>",
        END_OF_TURN: "<end_of_turn>",
    }
    pieces = [control.get(i, f"<unused{i}>") for i in range(107)]
    pieces += ["\n" * (i + 1) for i in range(FIRST_BYTE - 107)]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*_CHARACTERS, *_WORDS]
    pieces += [f"~{i}" for i in range(VOCAB_SIZE - len(pieces))]
    model = BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in control.values()]
    )
    return Tokenizer(
        tokenizer,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS,
        eos_token_ids=(EOS, END_OF_TURN),
        chat_template=chat_template,
    )


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big")


_TEXT_TOKENS = range(FIRST_TEXT, FIRST_TEXT + len(_CHARACTERS) + len(_WORDS))


def greedy_token(prefix: Sequence[int]) -> int:
    """Depends on the last tokens and the length alone. Now and then a character of two byte tokens."""
    if prefix and prefix[-1] == FIRST_BYTE + 0xC3:
        return FIRST_BYTE + 0xA9
    value = _hash(len(prefix), list(prefix[-8:]))
    return FIRST_BYTE + 0xC3 if value % 12 == 0 else _TEXT_TOKENS[value % len(_TEXT_TOKENS)]


def hidden_state(token_id: int) -> npt.NDArray[np.float64]:
    """Of the token alone, so that a mean tells which tokens were pooled, and how often."""
    return np.array([token_id, token_id**2, 1, _hash(token_id) % 1000], dtype=np.float64)


def token_logprobs(
    prefix: Sequence[int], token_id: int, num_top: int, labels: Sequence[int] | None = None
) -> TokenLogprobs:
    best = greedy_token(prefix)

    def logprob(token: int) -> float:
        return -0.25 if token == best else -1.0 - token / 64

    top = [best, *(token for token in range(FIRST_TEXT, FIRST_TEXT + num_top + 1) if token != best)][:num_top]
    if labels is not None:
        return TokenLogprobs(token_id, logprob(token_id), [(token, logprob(token)) for token in labels])
    rank = 1 if token_id == best else token_id + 1 + (best > token_id)
    return TokenLogprobs(token_id, logprob(token_id), [(token, logprob(token)) for token in top], rank)


@dataclass
class FakeRunner:
    """Each step takes ``step_delay`` seconds, and ``token_delay`` more per token. A prompt with POISON fails
    alone, one with CRASH takes the engine down, one with HANG stops the step until ``released`` is set, one
    with HUNGRY finds no memory; each after as many tokens as the prompt holds of it, less one."""

    step_delay: float = 0.0
    token_delay: float = 0.0
    chunk_sizes: list[int] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def run(self, step: StepInput) -> StepResult:
        chunks = sequences_of(step)
        self.chunk_sizes.extend(len(chunk.token_ids) for chunk in chunks)
        delay = self.step_delay + self.token_delay * sum(len(chunk.token_ids) for chunk in chunks)
        if delay:
            time.sleep(delay)
        return StepResult.of([self._run_chunk(chunk) for chunk in chunks])

    def _run_chunk(self, chunk: StepSequence) -> ChunkResult:
        tokens = [*chunk.prompt_token_ids, *chunk.output_token_ids]
        prompt, num_output = list(chunk.prompt_token_ids), len(chunk.output_token_ids)
        result = ChunkResult()
        if chunk.pooling:
            result.hidden_sum = sum((hidden_state(token) for token in chunk.token_ids), np.zeros(HIDDEN_SIZE))
        if chunk.sampling.prompt_logprobs is not None:
            for i, target in enumerate(chunk.prompt_targets):
                prefix = tokens[: chunk.start + i + 1]
                result.prompt_logprobs.append(token_logprobs(prefix, target, chunk.sampling.prompt_logprobs))
        if not chunk.samples:
            return result
        if CRASH in prompt and num_output >= prompt.count(CRASH) - 1:
            raise RuntimeError("injected failure of the model step in /secret/path")
        if HUNGRY in prompt and num_output >= prompt.count(HUNGRY) - 1:
            raise StepMemoryError("injected lack of memory")
        if HANG in prompt and num_output >= prompt.count(HANG) - 1:
            self.released.wait(60)
        if POISON in prompt and num_output >= prompt.count(POISON) - 1:
            return ChunkResult(error=NOT_FINITE)
        token = self._sample(tokens, num_output, chunk.sampling)
        if chunk.grammar is not None:
            try:
                mask = chunk.grammar.mask()
            except GrammarFault as fault:
                return ChunkResult(error=str(fault))
            if mask is None:
                return result
            allowed = [i for i in range(VOCAB_SIZE) if mask[i >> 3] >> (i & 7) & 1]
            if token not in allowed:
                token = allowed[_hash(chunk.sampling.seed, chunk.sampling.choice, num_output) % len(allowed)]
        result.token_ids = [token]
        if chunk.sampling.logprobs is not None:
            labels = chunk.sampling.logprob_token_ids
            result.logprobs = [token_logprobs(tokens, token, chunk.sampling.logprobs, labels)]
        return result

    def _sample(self, tokens: Sequence[int], num_output: int, sampling: SamplingParams) -> int:
        for token, bias in sampling.logit_bias:
            if bias == 100.0 and not (num_output < sampling.min_tokens and token in sampling.stop_token_ids):
                return token
        if sampling.greedy:
            return greedy_token(tokens)
        value = _hash(sampling.seed, sampling.choice, num_output, list(tokens[-8:]))
        return _TEXT_TOKENS[value % len(_TEXT_TOKENS)]


def fake_engine_factory(
    runner: FakeRunner | None = None,
    *,
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    default_sampling: dict[str, object] | None = None,
    before_load: Callable[[], None] = lambda: None,
) -> Callable[[Settings, Callable[[str], None]], LoadedEngine]:
    """``before_load`` runs in the loading thread, to make a load slow or fail."""

    def load(settings: Settings, report_phase: Callable[[str], None]) -> LoadedEngine:
        report_phase("weights")
        before_load()
        spec = KVCacheSpec(
            block_size=8,
            sliding_window=16,
            num_global_layers=1,
            num_local_layers=2,
            bytes_per_token_per_layer=8,
        )
        num_local = spec.local_pool_blocks(max_num_seqs, max_num_batched_tokens)
        num_global = 1 + max_num_seqs * max_model_len // 8
        batch = RunningBatch(max_num_seqs, num_global - 1)
        kv = KVCacheManager(spec, batch, num_global, num_local, prefix_caching=settings.prefix_caching)
        config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len)
        core = EngineCore(runner or FakeRunner(), kv, config, debug_invariants=True)
        tokenizer = fake_tokenizer()
        return LoadedEngine(
            engine=AsyncEngine(core, EngineLimits(max_model_len, max_num_seqs, (num_global - 1) * 8)),
            tokenizer=tokenizer,
            grammars=GrammarCompiler(tokenizer),
            model_names=list(settings.served_model_name) or ["fake-gemma"],
            hidden_size=HIDDEN_SIZE,
            default_sampling=dict(default_sampling or {}),
            fingerprint="0123456789abcdef",
            model_info={
                "model": "fake-gemma",
                "architecture": "Fake",
                "dtype": "float32",
                "quantization": "none",
                "max_model_len": str(max_model_len),
                "fingerprint": "0123456789abcdef",
            },
            cache_info={
                "block_size": "8",
                "num_gpu_blocks": str(num_global),
                "kv_dtype": "float32",
                "prefix_caching": str(settings.prefix_caching).lower(),
            },
            startup_seconds=dict.fromkeys(("import", "weights", "compile", "warmup"), 0.0),
            read_memory=lambda: {"weights": 4096, "kv_cache": 1024, "device_free": 1 << 30},
        )

    return load
