"""From settings to a running engine: open, load, size the cache, wire."""
