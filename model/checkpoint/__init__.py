"""Checkpoints, whatever form they come in: configuration, tokenizer and named tensors. Imports no torch."""
