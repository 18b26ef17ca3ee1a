"""Text to tokens on disk, and from there to samples: sources → preprocess → indexed → samples → loader."""
