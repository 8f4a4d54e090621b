"""Routes, bodies and answers, a folder for each endpoint. Never imports torch."""
