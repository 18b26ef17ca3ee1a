"""Text out of a trained model: loading it from wherever it lies, a static key/value cache, sampling."""

from holdfast.generation.engine import Completion, generate

__all__ = ["Completion", "generate"]
