"""Request bodies: their types, and their decoding."""
