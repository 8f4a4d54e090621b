"""A soak: random load at several times the cache's budget against a real server process, with books kept on
both sides."""
