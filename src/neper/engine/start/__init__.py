"""What is built once, before the first step."""
