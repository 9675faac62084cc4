"""Request bodies: their types, and how they are decoded."""
