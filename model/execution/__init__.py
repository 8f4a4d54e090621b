"""A loaded model that runs steps: the runner, CUDA graphs, memory of the device, packed weights on disk."""
