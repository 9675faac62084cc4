"""Bodies to engine requests, every bound checked."""
