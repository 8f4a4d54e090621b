"""GET /tokenizer_info, POST /tokenize and POST /detokenize."""
