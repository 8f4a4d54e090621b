"""Chat messages to prompt text: the order of turns, and Jinja in bounds."""
