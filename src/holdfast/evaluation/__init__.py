"""Scores of a trained model: perplexity and bits per byte of a text, and the tasks of EleutherAI's lm-evaluation-harness."""
