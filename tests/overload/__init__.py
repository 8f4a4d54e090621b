"""Overload: ten times more clients than places against a real server process, held against what it does for
as many as it has places for."""
