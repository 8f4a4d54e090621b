"""The HTTP service: validation, text, the engine and its scheduler. Importing this package imports no
torch."""
