"""The comparison of the fast engine with the reference engine, on a sample of every run's texts."""

from collections.abc import Sequence

from holdfast.data.preprocess.worker import release_memory
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import Recipe, Tokenizer


class CrossCheck:
    """Encodes the samples of the workers with the reference engine; the first differing id ends the run."""

    def __init__(self, recipe: Recipe, engine: str) -> None:
        self._recipe = recipe
        self._needed = recipe.family == "json" and engine != "reference"
        self._reference: Tokenizer | None = None

    def load(self) -> None:
        if self._needed and self._reference is None:
            self._reference = Tokenizer(self._recipe, "reference")
            release_memory()

    def compare(self, samples: Sequence[tuple[str, bytes]]) -> None:
        if not samples:
            return
        self.load()
        assert self._reference is not None
        ids, offsets = self._reference.encode_batch([text for text, _ in samples])
        for number, (text, got) in enumerate(samples):
            expected = ids[offsets[number] : offsets[number + 1]]
            if expected.tobytes() != got:
                raise HoldfastError(
                    f"the fast engine and {self._reference.engine} give different tokens for the text {text[:60]!r}...; "
                    "this is a bug of the fast engine: run again with --tokenizer-engine reference"
                )
