"""Plans of steps: requests as sequences, their blocks, and the order of turns. No tensors."""
