"""In which types and bits a model is kept and computed. Imports no torch."""

from model.interface.errors import ConfigError


def resolve_quantization(quantization: str, dtype: str) -> str:
    """What a --quantization value means: "auto" is "none" where a --dtype asks for the weights as they
    are."""
    if quantization not in ("auto", "none", "int8", "int4", "fp8"):
        raise ConfigError(
            f"--quantization {quantization} is not supported. Use int8, int4, fp8, none or auto."
        )
    return "none" if quantization == "auto" and dtype != "auto" else quantization
