"""Training samples out of indexed datasets: GPT and BERT samples, blends, splits, cached indices."""
