"""The server that ``gemserve bench --front-end`` measures: the real application, with its HTTP, its text, its
engine and a real model runner, over a device that takes no time. Prints its port, and serves until SIGTERM.

    python -m server.bench.front_end_server MODEL_NAME NUM_STREAMS MAX_MODEL_LEN
"""

import asyncio
import socket
import sys
from collections.abc import Callable

import tokenizers
import uvicorn
from tokenizers import AddedToken, decoders, models, normalizers

from model.bench.stub_device import stub_runner
from model.interface.running_batch import RunningBatch
from server.app import create_app
from server.engine.async_engine import AsyncEngine, EngineLimits
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.scheduler.scheduler import SchedulerConfig
from server.grammar.compiler import GrammarCompiler
from server.http.protocol import http_protocol
from server.loading.load import LoadedEngine
from server.settings.settings import Settings
from server.text.tokenizer import Tokenizer

VOCAB_SIZE = 1 << 16  # above the tokens of a load's prompts, and what a stub device draws
CONTROL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<start_of_turn>", 106: "<end_of_turn>"}
FIRST_BYTE = 238  # as Gemma's
BACKLOG = 2048


def word_tokenizer() -> Tokenizer:
    """Every token after the bytes is a word with a blank in front of it."""
    pieces = [CONTROL.get(token_id, f"<unused{token_id}>") for token_id in range(FIRST_BYTE)]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [f"▁w{token_id}" for token_id in range(len(pieces), VOCAB_SIZE)]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(literal, normalized=False, special=True) for literal in CONTROL.values()]
    )
    return Tokenizer(tokenizer, vocab_size=VOCAB_SIZE, bos_token_id=2, eos_token_ids=(1, 106))


def load_without_weights(settings: Settings, model_name: str, max_model_len: int) -> LoadedEngine:
    """What a load of a model gives, with a cache that holds every stream to its end."""
    runner = stub_runner(settings.block_size)
    num_seqs, num_batched = settings.max_num_seqs, settings.max_num_batched_tokens
    num_global = 1 + num_seqs * (max_model_len // settings.block_size + 1)
    num_local = runner.spec.local_pool_blocks(num_seqs, num_batched)
    batch = RunningBatch(num_seqs, runner.spec.global_blocks(max_model_len))
    kv = KVCacheManager(runner.spec, batch, num_global, num_local, prefix_caching=settings.prefix_caching)
    core = EngineCore(runner, kv, SchedulerConfig(num_seqs, num_batched, max_model_len))
    tokenizer = word_tokenizer()
    return LoadedEngine(
        engine=AsyncEngine(core, EngineLimits(max_model_len, num_seqs, kv.capacity_tokens)),
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer),
        model_names=[model_name],
        hidden_size=1,
        default_sampling={},
        fingerprint=model_name,
        model_info={"model": model_name},
        cache_info={"block_size": str(settings.block_size)},
    )


def serve(model_name: str, num_streams: int, max_model_len: int) -> None:
    """The settings are those of ``gemserve serve``, but for the number of sequences."""
    settings = Settings(max_num_seqs=num_streams)

    def load(settings: Settings, report_phase: Callable[[str], None]) -> LoadedEngine:
        return load_without_weights(settings, model_name, max_model_len)

    config = uvicorn.Config(
        create_app(settings, engine_factory=load),
        log_config=None,
        access_log=False,
        http=http_protocol(settings.read_timeout, settings.max_connections),
        ws="none",
        server_header=False,
    )
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        print(listener.getsockname()[1], flush=True)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
