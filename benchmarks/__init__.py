"""Measurements for who changes neper; what users repeat is `neper bench`."""
