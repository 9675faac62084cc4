"""What the op families share: the order of ids, and how kernels are compiled and launched."""
