"""Triton kernels of the CUDA backend, Ampere to Hopper, and the functions that launch them.
``cuda/backend.py`` is their owner.

Only features that Triton has had for years are used, so that every version that torch 2.11 and later bring
compiles them. Nothing here waits for the device, and what is launched depends on shapes and host numbers
only: see ``CudaOps`` for what a CUDA graph may hold. Of sizes that change from step to step, kernels are
specialised on powers of two alone (tokens of one program, splits of a context): a handful of variants per
model, each compiled by the first batch of its size and then kept in Triton's cache.
"""
