"""A step's results as one flat tensor."""
