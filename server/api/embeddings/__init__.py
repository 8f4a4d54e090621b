"""POST /v1/embeddings: one vector for each input."""
