"""What every endpoint that generates shares: body, prompts, sampling, tools, constraints, run, events."""
