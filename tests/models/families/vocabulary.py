"""What all random checkpoints have in common."""

VOCAB = 53
