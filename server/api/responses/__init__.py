"""POST /v1/responses: typed items in and out."""
