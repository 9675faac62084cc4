"""Embedding, norms and activations, each in one pass."""
