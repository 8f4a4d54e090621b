"""From logits to tokens: settings of each request, random streams, log-probabilities, masks of grammars."""
