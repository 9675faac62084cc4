"""The reduction: a row of logits to the log-probabilities that were asked for."""
