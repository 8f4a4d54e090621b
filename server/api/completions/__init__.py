"""POST /v1/completions: a prompt continued."""
