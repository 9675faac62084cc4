"""Schemas of replies: the structs that they are encoded from, and that the OpenAPI document describes."""
