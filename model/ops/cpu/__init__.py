"""The CPU backend: C++ kernels, how they are built, and the layouts of their weights."""
