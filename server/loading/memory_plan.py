"""The memory plan of a model: weights, both cache pools and how many requests fit. ``gemserve info`` prints
it for a model that is not loaded, the start of the server for the one that is, both through ``make_report``.
Imports no torch."""

from dataclasses import asdict, dataclass

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import parameter_count
from model.interface.kv_cache_spec import KVCachePlan, KVCacheSpec, ceil_div

FIT_LENGTHS = (1024, 8192, 32768)
# Share of the host's memory free after loading that the cache gets by default: other programs and the
# activations of a step live in the same memory.
HOST_CACHE_SHARE = 0.5


def default_kv_cache_memory(free_bytes: int) -> int:
    """Budget of a cache in the host's memory when --kv-cache-memory is not given; ``free_bytes`` is what
    weights have left."""
    return int(free_bytes * HOST_CACHE_SHARE)


def effective_max_model_len(config: Gemma3Config, plan: KVCachePlan, max_model_len: int | None) -> int:
    """The longest sequence: the least of the model's positions, the flag and what the global pool holds."""
    return min(
        config.max_position_embeddings, plan.capacity_tokens, max_model_len or config.max_position_embeddings
    )


def requests_that_fit(spec: KVCacheSpec, plan: KVCachePlan, num_tokens: int, max_num_seqs: int) -> int:
    """Sequences of so many tokens that run at once. The local pool always holds max_num_seqs, so the global
    one decides."""
    blocks = spec.blocks(num_tokens - 1, 1).global_blocks
    if not spec.num_global_layers:
        return max_num_seqs
    return min(max_num_seqs, (plan.num_global_blocks - 1) // blocks)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything the plan says, as plain values: the JSON form of ``gemserve info``."""

    name: str
    parameters_tied: int
    parameters_untied: int
    tie_word_embeddings: bool
    layer_map: str
    num_global_layers: int
    num_local_layers: int
    sliding_window: int
    weight_bytes: int
    weight_format: str
    dtype: str
    kv_bytes_per_token_per_layer: int
    kv_bytes_per_token_global: int
    kv_bytes_per_token_all_layers: int
    block_size: int
    global_blocks: int
    global_bytes: int
    local_blocks: int
    local_bytes: int
    capacity_tokens: int
    max_model_len: int
    max_num_seqs: int
    sequence_bytes: dict[int, int]
    requests_that_fit: dict[int, int]
    tensor_parallel_size: int  # bytes are those of each of so many devices

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def text(self) -> str:
        share = self.sequence_bytes[FIT_LENGTHS[-1]] / (FIT_LENGTHS[-1] * self.kv_bytes_per_token_all_layers)
        fits = ", ".join(f"{_short(length)}: {self._fit(length)}" for length in FIT_LENGTHS)
        sizes = ", ".join(
            f"{_short(length)}: {format_bytes(self.sequence_bytes[length])}" for length in FIT_LENGTHS
        )
        lines = [
            ("model", f"{self.name} ({self.weight_format})"),
            (
                "parameters",
                f"{self.parameters_tied:,} with the head tied to the embedding, "
                f"{self.parameters_untied:,} untied",
            ),
            ("", f"this model is {'tied' if self.tie_word_embeddings else 'untied'}"),
            ("layers", f"{self.layer_map} (L local, window {self.sliding_window:,}; G global)"),
            ("weights", f"{format_bytes(self.weight_bytes)} in {self.dtype}"),
            *self._devices(),
            (
                "cache",
                f"{format_bytes(self.kv_bytes_per_token_global)} per token in {self.num_global_layers} "
                f"global layers; {self.num_local_layers} local layers stop growing at their window",
            ),
            (
                "",
                f"one request at {sizes} ({share:.0%} of keeping every token in every layer at "
                f"{_short(FIT_LENGTHS[-1])})",
            ),
            (
                "global pool",
                f"{format_bytes(self.global_bytes)}, {self.global_blocks:,} blocks of {self.block_size} "
                f"tokens: {self.capacity_tokens:,} tokens",
            ),
            ("local pool", f"{format_bytes(self.local_bytes)}, {self.local_blocks:,} blocks"),
            ("limits", f"max_model_len {self.max_model_len:,}, max_num_seqs {self.max_num_seqs}"),
            ("fit at once", fits),
        ]
        return "\n".join(f"{label:<12}{value}" for label, value in lines)

    def _devices(self) -> list[tuple[str, str]]:
        size = self.tensor_parallel_size
        return (
            [("devices", f"{size} share the model; weights and cache are those of each")] if size > 1 else []
        )

    def _fit(self, length: int) -> str:
        return (
            f"{self.requests_that_fit[length]}"
            if length <= self.max_model_len
            else "longer than max_model_len"
        )


def make_report(
    config: Gemma3Config,
    spec: KVCacheSpec,
    plan: KVCachePlan,
    *,
    name: str,
    weight_bytes: int,
    weight_format: str,
    dtype: str,
    max_num_seqs: int,
    max_model_len: int | None,
    tensor_parallel_size: int = 1,
) -> PlanReport:
    """``spec``, ``plan`` and ``weight_bytes`` are those of one device."""
    return PlanReport(
        name=name,
        parameters_tied=parameter_count(config, tied=True),
        parameters_untied=parameter_count(config, tied=False),
        tie_word_embeddings=config.tie_word_embeddings,
        layer_map=layer_map(config),
        num_global_layers=spec.num_global_layers,
        num_local_layers=spec.num_local_layers,
        sliding_window=spec.sliding_window,
        weight_bytes=weight_bytes,
        weight_format=weight_format,
        dtype=dtype,
        kv_bytes_per_token_per_layer=spec.bytes_per_token_per_layer,
        kv_bytes_per_token_global=spec.num_global_layers * spec.bytes_per_token_per_layer,
        kv_bytes_per_token_all_layers=config.num_hidden_layers * spec.bytes_per_token_per_layer,
        block_size=spec.block_size,
        global_blocks=plan.num_global_blocks,
        global_bytes=plan.global_bytes,
        local_blocks=plan.num_local_blocks,
        local_bytes=plan.local_bytes,
        capacity_tokens=plan.capacity_tokens,
        max_model_len=effective_max_model_len(config, plan, max_model_len),
        max_num_seqs=max_num_seqs,
        sequence_bytes={length: spec.sequence_bytes(length) for length in FIT_LENGTHS},
        requests_that_fit={
            length: requests_that_fit(spec, plan, length, max_num_seqs) for length in FIT_LENGTHS
        },
        tensor_parallel_size=tensor_parallel_size,
    )


def layer_map(config: Gemma3Config) -> str:
    """Letters of the layers in groups of six, such as "LLLLLG LLLLLG LLLLLG"."""
    letters = "".join("G" if is_global else "L" for is_global in config.global_layers)
    return " ".join(letters[6 * group : 6 * group + 6] for group in range(ceil_div(len(letters), 6)))


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _short(num_tokens: int) -> str:
    return f"{num_tokens // 1024}k"
