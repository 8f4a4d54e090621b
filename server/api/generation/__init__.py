"""What every endpoint that generates shares: body, prompts, sampling, tools, constraints, plan, run, stream
of events."""
