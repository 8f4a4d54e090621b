"""POST /v1/chat/completions: a chat answered."""
