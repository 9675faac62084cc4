"""Arrays of scores to logprob entries, as ready-made JSON."""
