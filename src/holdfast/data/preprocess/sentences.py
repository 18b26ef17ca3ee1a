"""Cutting a text into sentences, for BERT: sentencex (Wikimedia's rules for some 300 languages, nothing to download).

Sentences come in order, without the blanks around them and none of them empty. With `keep_newlines` a sentence keeps the line
breaks behind it, and nothing but blanks at the edges of the text is lost.
"""

import itertools
import re

from holdfast.system.errors import UsageError

# sentencex 1.0 panics where one of these blanks stands between a letter and a period: it is shown plain ones there.
_BLANK = "[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
# A run of blanks is looked at from its beginning only: a long one takes no longer than other text.
_BLANKS_BEFORE_PERIOD = re.compile(rf"(?<!{_BLANK}){_BLANK}++(?=\.)")

# Names that users of NLTK's models give to --lang.
LANGUAGES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}


def language_code(name: str) -> str:
    """The ISO code of a language given by code or by its English name."""
    code = LANGUAGES.get(name.lower(), name.lower())
    if not (2 <= len(code) <= 3 and code.isalpha() and code.isascii()):
        raise UsageError(f"--lang {name} is not known; give an ISO code such as en, or one of: {', '.join(LANGUAGES)}")
    return code


class SentenceSplitter:
    def __init__(self, language: str, keep_newlines: bool = False) -> None:
        import sentencex

        self._segment = sentencex.segment
        self._language, self._keep_newlines = language_code(language), keep_newlines

    def split(self, text: str) -> list[str]:
        pieces = list(filter(None, map(str.strip, self._cut(text))))
        return _with_newlines(text, pieces) if self._keep_newlines and pieces else pieces

    def _cut(self, text: str) -> list[str]:
        plain = _BLANKS_BEFORE_PERIOD.sub(lambda blanks: " " * len(blanks[0]), text)
        cut: list[str] = self._segment(self._language, plain)
        if plain == text:
            return cut
        ends = itertools.accumulate(map(len, cut), initial=0)
        return [text[start:end] for start, end in itertools.pairwise(ends)]


def _with_newlines(text: str, pieces: list[str]) -> list[str]:
    """Each sentence with what stands between it and the next one, up to the last line break there."""
    starts = []
    position = 0
    for piece in pieces:
        position = text.index(piece, position)
        starts.append(position)
        position += len(piece)
    ends = [*starts[1:], len(text)]
    return [text[start:end].rstrip(" \t") for start, end in zip(starts, ends, strict=True)]
