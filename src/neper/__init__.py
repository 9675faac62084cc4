"""neper: an LLM inference server and library with exact, aligned, nearly free token log-probabilities."""

__version__ = "0.1.0"
