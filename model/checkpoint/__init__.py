"""Checkpoints, whatever form they come in: configuration, tokenizer and named tensors. Importing it imports
no torch."""
