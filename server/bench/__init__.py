"""Closed-loop streaming load on OpenAI-style servers, for ``gemserve bench``. Knows the wire only, nothing of the engine."""
