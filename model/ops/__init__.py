"""The operations that must be fast: their interface, the backends behind it, and the choice between them."""
