"""Constrained decoding: a mask over the tokens before every draw. Knows neither HTTP nor tensors."""
