"""What a step computes: requests as sequences, their blocks, and whose turn it is. No tensors."""
