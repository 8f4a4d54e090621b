"""Continuous batching: block pools, KV manager, scheduler, the step loop and its thread."""
