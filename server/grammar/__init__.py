"""Constrained decoding: a JSON schema, a regular expression, a list of choices or a grammar becomes a mask over the tokens before
every draw. Built on llguidance. Knows neither HTTP nor tensors."""
