"""Training-free visual-token pruning for vision-language models."""
