"""Shapes of answers and events, for the OpenAPI description."""
