"""Measuring what a pruned model still knows: scores, retention, error bars, and the paper's published numbers."""
