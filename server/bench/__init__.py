"""Load on OpenAI-style servers and measurements of our own, for ``gemserve bench`` and for development."""
