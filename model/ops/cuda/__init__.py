"""The CUDA backend: Triton kernels, torch's matrix products, and weights in 8 bits."""
