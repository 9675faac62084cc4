"""Builds all that steps need, once, before the first one."""
