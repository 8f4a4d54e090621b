"""Every setting of the server: its flag, variable, type and default."""
