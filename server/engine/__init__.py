"""Continuous batching: the step loop, its thread, and a request as the engine sees it."""
