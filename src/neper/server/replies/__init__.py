"""Deltas of choices to the JSON of an endpoint."""
