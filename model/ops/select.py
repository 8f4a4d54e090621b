"""Chooses the backend for a device, once, when a model is loaded."""

import logging

import torch

from model.interface.errors import ConfigError
from model.ops.interface import Ops
from model.precision import kept_quantization

logger = logging.getLogger(__name__)


def select_ops(device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Ops:
    """The best backend for a device and compute dtype that works on this machine.

    ``quantization``: "none" keeps weights as they are; "int8" and "int4" round those of linear layers to 8 or
    4 bits, "fp8" also their inputs; "auto" is int8 on CPUs with fast kernels for it, whose loss is too small
    to matter (docs/performance.md), and elsewhere none. Raises ConfigError when no backend does what was
    asked.
    """
    from model.ops.reference import ReferenceOps

    if device.type == "cuda":
        return _select_cuda_ops(device, dtype, kept_quantization(quantization, "cuda", has_kernels=False))
    if quantization == "fp8":
        raise ConfigError("--quantization fp8 needs a CUDA device. On a CPU, use int8, int4, none or auto.")
    if device.type == "cpu":
        from model.ops.cpu.backend import CpuOps
        from model.ops.cpu.build import BuildError
        from model.ops.cpu.weights import WeightStorage

        kept = kept_quantization(quantization, "cpu", has_kernels=True)
        storages: dict[str, WeightStorage] = {"none": "exact", "int8": "int8", "int4": "int4"}
        try:
            return CpuOps(device, dtype, storages[kept])
        except BuildError as error:
            logger.warning(
                "The fast CPU kernels are not used: %s. Everything works, several times slower.", error
            )
    if quantization in ("int8", "int4"):
        raise ConfigError(
            f"--quantization {quantization} needs the compiled CPU kernels, which are not to be had here. "
            "Use none or auto."
        )
    return ReferenceOps(device, dtype)


def _select_cuda_ops(device: torch.device, dtype: torch.dtype, quantization: str) -> Ops:
    from model.ops.cuda.quantized import QuantizedOps
    from model.ops.reference import ReferenceOps

    if quantization == "int4":
        raise ConfigError(
            "--quantization int4 is not supported on GPUs. Use int8, fp8 (Ada, Hopper and later) or none."
        )
    try:
        from model.ops.cuda.backend import CudaOps, QuantizedCudaOps
    except ImportError as error:
        logger.warning(
            "The CUDA kernels are not used: %s. Everything works, several times slower. Install triton.",
            error,
        )
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            match quantization:
                case "int8" | "fp8":
                    return QuantizedCudaOps(device, dtype, quantization)
            return CudaOps(device, dtype)
        logger.warning(
            "The CUDA kernels are not used: they are made for compute capability 8.0 (Ampere) and later, "
            "and this device has %d.%d. Everything works, several times slower.",
            major,
            minor,
        )
    match quantization:
        case "int8" | "fp8":
            return QuantizedOps(device, dtype, quantization)
    return ReferenceOps(device, dtype)
