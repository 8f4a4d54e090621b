"""Settings: precedence of the sources, values of every kind, and errors that name where the wrong value
stands."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from server.settings.settings import (
    SETTINGS,
    Settings,
    SettingsError,
    add_arguments,
    load_settings,
    settings_table,
    unknown_variables,
)
from server.settings.types import parse_size

ROOT = Path(__file__).parent.parent.parent.parent


def parse(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args(arguments))


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "gemserve.toml"
    config.write_text('port = 1\nhost = "file"\nblock_size = 8\nserved-model-name = ["a", "b"]\n')
    environ = {"GEMSERVE_PORT": "2", "GEMSERVE_HOST": "variable", "GEMSERVE_CONFIG": str(config)}
    settings = load_settings(parse("--port", "3"), environ)
    assert (settings.port, settings.host, settings.block_size, settings.dtype) == (3, "variable", 8, "auto")
    assert settings.served_model_name == ("a", "b")


def test_every_kind_of_value_reads_the_same_from_flags_and_variables() -> None:
    flags = parse(
        "model.gguf",
        "--kv-cache-memory",
        "1.5GiB",
        "--no-prefix-caching",
        "--api-key",
        "a",
        "b",
        "--shutdown-timeout",
        "2.5",
    )
    environ = {
        "GEMSERVE_MODEL": "model.gguf",
        "GEMSERVE_KV_CACHE_MEMORY": "1536MiB",
        "GEMSERVE_PREFIX_CACHING": "off",
        "GEMSERVE_API_KEY": "a,b",
        "GEMSERVE_SHUTDOWN_TIMEOUT": "2.5",
    }
    assert load_settings(flags, {}) == load_settings({}, environ)
    assert load_settings(flags, {}).kv_cache_memory == 3 << 29


def test_buckets_read_the_same_from_every_source(tmp_path: Path) -> None:
    config = tmp_path / "gemserve.toml"
    config.write_text("inter-token-latency-buckets = [0.5, 1, 2.5]")
    expected = (0.5, 1.0, 2.5)
    for flags, environ in (
        (parse("--inter-token-latency-buckets", "0.5", "1", "2.5"), {}),
        (parse("--inter-token-latency-buckets", "0.5,1,2.5"), {}),
        ({}, {"GEMSERVE_INTER_TOKEN_LATENCY_BUCKETS": "0.5, 1,2.5"}),
        ({"config": str(config)}, {}),
    ):
        assert load_settings(flags, environ).inter_token_latency_buckets == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1g", 1 << 30),
        ("4096", 4096),
        (7, 7),
        ("3 k", 3072),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2XB", "0", True, None, 1.5])
def test_wrong_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--port", "x"], {}, "--port: expected an integer"),
        ([], {"GEMSERVE_PORT": "70000"}, "GEMSERVE_PORT: expected an integer from 0 to 65535"),
        (
            [],
            {"GEMSERVE_PORT": "tcp://10.0.0.1:8000"},
            "for a service named gemserve; set enableServiceLinks",
        ),
        (
            [],
            {"GEMSERVE_METRICS_PORT": "tcp://10.0.0.1:9100"},
            "for a service named gemserve-metrics; set enableServiceLinks",
        ),
        ([], {"GEMSERVE_PREFIX_CACHING": "maybe"}, "GEMSERVE_PREFIX_CACHING: expected true or false"),
        ([], {"GEMSERVE_API_KEY": " , "}, "GEMSERVE_API_KEY: expected texts separated by commas"),
        (["--dtype", "float16"], {}, "--dtype: 'float16' is not supported: Gemma 3 overflows"),
        (["--quantization", "int3"], {}, "--quantization: expected one of auto, none, int8, int4"),
        (["--device", "tpu"], {}, "--device: expected one of auto, cpu, cuda"),
        (["--tensor-parallel-size", "0"], {}, "--tensor-parallel-size: expected an integer from 1"),
        (
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            {},
            "--max-num-batched-tokens 8 is less than --max-num-seqs 9",
        ),
        (["--chat-template", "/does/not/exist"], {}, "--chat-template: there is no file /does/not/exist"),
        (
            ["--time-to-first-token-buckets", "1", "1"],
            {},
            "--time-to-first-token-buckets: expected ascending numbers above 0",
        ),
        (
            [],
            {"GEMSERVE_REQUEST_PHASE_BUCKETS": "0,1"},
            "GEMSERVE_REQUEST_PHASE_BUCKETS: expected ascending numbers above 0",
        ),
        (
            ["--otlp-endpoint", "localhost:4317"],
            {},
            "--otlp-endpoint: expected an address such as http://localhost:4318",
        ),
        (["--metrics-port", "70000"], {}, "--metrics-port: expected an integer from 0 to 65535"),
        (["--metrics-compat", "tgi"], {}, "--metrics-compat: expected one of none, vllm"),
        (["--config", "/does/not/exist"], {}, "--config /does/not/exist: No such file"),
    ],
)
def test_a_wrong_value_is_named(flags: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(parse(*flags), environ)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port?"),
        ("port = '80x'", "port: expected an integer"),
        ("port = true", "port: expected an integer"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_wrong_configuration_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    config = tmp_path / "gemserve.toml"
    config.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings({"config": str(config)}, {})
    assert named in str(caught.value)
    assert str(config) in str(caught.value)


def test_the_default_number_of_sequences_follows_a_small_token_budget() -> None:
    assert Settings().max_num_seqs == 64
    assert Settings(max_num_batched_tokens=16).max_num_seqs == 16


def test_unknown_variables_are_told_apart_from_service_links() -> None:
    environ = {
        "GEMSERVE_MAX_SEQS": "1",
        "GEMSERVE_SERVICE_HOST": "10.0.0.1",
        "GEMSERVE_PORT_8000_TCP": "x",
        "GEMSERVE_HOST": "h",
    }
    environ |= {"GEMSERVE_METRICS_SERVICE_PORT": "9100", "GEMSERVE_COMMIT": "abc1234"}
    assert unknown_variables(environ) == [
        "the variable GEMSERVE_MAX_SEQS is not a setting; did you mean GEMSERVE_MAX_NUM_SEQS?"
    ]


def test_defaults_are_valid_and_every_field_has_a_flag() -> None:
    actions = argparse.ArgumentParser()
    add_arguments(actions)
    shown = actions.format_help()
    assert [item.name for item in SETTINGS] == [item.name for item in dataclasses.fields(Settings)]
    assert all(item.flag in shown for item in SETTINGS)
    assert Settings() == load_settings({}, {})


def test_the_page_of_settings_is_up_to_date() -> None:
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == settings_table(), "run `make docs`"
