"""The flags that name a model's tokenizer, for every verb that reads a model."""

from dataclasses import dataclass

from holdfast.config import TokenizerType
from holdfast.tokenizers.folder import KEYS


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Flags of a verb whose options inherit from this class."""

    vocab_file: str | None = None
    """vocab.json (GPT-2) or vocab.txt (BERT) of the tokenizer, for a model that names none (Megatron's), or a catalog name
    such as gpt2."""
    merge_file: str | None = None
    """merges.txt (GPT-2)."""
    tokenizer_model: str | None = None
    """tokenizer.json or its folder, a SentencePiece model or a tiktoken file, instead of the two above."""
    tokenizer_type: TokenizerType | None = None
    """Kind of the tokenizer. Unset: that of the model, or what its files show."""

    def tokenizer_names(self) -> dict[str, str | None]:
        """The values by the names that a recipe has for them."""
        return {key: getattr(self, key) for key in KEYS}
