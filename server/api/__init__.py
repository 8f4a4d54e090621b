"""HTTP routers and wire schemas. Never imports torch."""
