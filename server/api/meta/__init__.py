"""What the server says of itself: models, health, metrics, version, /docs and /openapi.json."""
