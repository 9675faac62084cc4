"""Shared by the op families: the order of ids, and compiling and launching kernels."""
