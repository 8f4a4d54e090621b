"""The description of a Gemma 3 text model, the spellings that it comes in, and its tensors. No torch."""
