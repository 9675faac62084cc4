"""One step: a plan becomes tensors, hidden states, tokens and scores, and results on the host."""
