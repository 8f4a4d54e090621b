"""Requests generated from /openapi.json, sound and unsound ones, against the real server with a fake
model."""
