"""Routes and wire schemas, a folder for each endpoint. Never imports torch."""
