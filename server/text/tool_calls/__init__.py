"""Calls of functions as text: how they are told, and how they are found."""
