"""Text in and out: tokenizer, detokenizer with stop strings. Imports neither engine nor api, and no torch."""
