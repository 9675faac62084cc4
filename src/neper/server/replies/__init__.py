"""What choices bring to the JSON of an endpoint."""
