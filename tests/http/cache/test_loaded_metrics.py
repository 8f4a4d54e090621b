"""What /metrics says of a model that was really loaded: its names, sizes and the phases of its start."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.http.cache.tiny_server import tiny_server


def test_a_loaded_model_is_described(tiny_folder: Path) -> None:
    with tiny_server(tiny_folder, pool_tokens=640) as server:
        server.complete(prompt="a", max_tokens=4)
        families = {
            family.name: family
            for family in text_string_to_metric_families(server.client.get("/metrics").text)
        }

        def labels(name: str) -> dict[str, str]:
            (sample,) = families[f"gemserve_{name}"].samples
            assert sample.value == 1
            return sample.labels

        def values(name: str, label: str) -> dict[str, float]:
            return {sample.labels[label]: sample.value for sample in families[f"gemserve_{name}"].samples}

        model = labels("model_info")
        assert len(model.pop("fingerprint")) >= 16
        assert model == {
            "model": tiny_folder.name,
            "architecture": "Gemma3ForCausalLM",
            "dtype": "float32",
            "quantization": "none",
            "max_model_len": model["max_model_len"],
        }
        assert 640 <= int(model["max_model_len"]) < 700
        cache = labels("cache_config_info")
        capacity = values("kv_cache_capacity_tokens", "pool")["global"]
        assert (int(cache["num_gpu_blocks"]) - 1) * int(cache["block_size"]) == capacity
        phases = values("startup_duration_seconds", "phase")
        assert set(phases) == {"import", "checkpoint", "tokenizer", "compile", "weights", "cache", "warmup"}
        assert min(phases.values()) >= 0
        memory = values("memory_bytes", "kind")
        assert set(memory) == {"weights", "kv_cache", "device_free"}, "a CPU has no count of activations"
        assert min(memory.values()) > 0
        assert min(values("engine_host_seconds", "stage").values()) > 0
