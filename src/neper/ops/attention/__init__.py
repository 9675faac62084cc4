"""Paged attention over the K/V cache."""
