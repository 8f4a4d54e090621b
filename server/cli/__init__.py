"""Command line. Importing it imports no torch."""
