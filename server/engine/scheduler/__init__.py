"""Which requests run in the next step, and what a finished step means for them. Imports no torch."""
