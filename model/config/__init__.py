"""The description of a Gemma 3 text model, and the spellings that it comes in. No torch."""
