"""Measurements that users can repeat: `neper bench`."""
