"""OpenAI batch files: requests as lines in, answers as lines out."""
