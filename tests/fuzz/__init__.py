"""Fuzzing: hostile requests over raw sockets against a real server process, which must go on as if nothing
had been."""
