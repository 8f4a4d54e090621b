"""POST /v1/decisions: typed questions about one input."""
