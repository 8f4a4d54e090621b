"""Gemma 3 as a network: the flat batch, its layers, and the tensors of its cache."""
