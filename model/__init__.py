"""Gemma 3 on torch: tokens and block tables in, tokens out. Knows no HTTP and no text. Importing it imports
no torch."""
