"""Names and prose use the words of the field: no people, furniture or moods. Identifiers are split into their words first."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "docs", "examples", "configs", "deploy")
SUFFIXES = {".md", ".py", ".sbatch", ".sh", ".svg", ".toml", ".yaml"}

# A word or phrase, and words to use instead.
INSTEAD = {
    "anew": "again, new",
    "crew": "worker pool",
    "desk": "status page",
    "guest": "peer copy",
    "hear|hears|heard": "receive, read",
    "last words": "error text",
    "meeting|meetings": "agreement",
    "mend|mends|mended": "fix, repair",
    "muster": "start",
    "nobody|somebody|whoever": "name the process or the user",
    "partner|partners": "peer",
    "sit|sits|sit down": "claim, own",
    "tell|tells|told": "report, send, log, show",
    "wish|wishes|wished": "request",
}
# Files that still use such words. Remove a file from the list when it is reworded; add none.
PENDING: set[str] = {
    "src/holdfast/data/fingerprint.py",
    "src/holdfast/data/indexed.py",
    "src/holdfast/data/preprocess/append.py",
    "src/holdfast/data/preprocess/provenance.py",
    "src/holdfast/data/preprocess/units.py",
    "src/holdfast/data/samples/index_cache.py",
    "src/holdfast/data/samples/masking.py",
    "src/holdfast/data/sources/compressed.py",
    "src/holdfast/data/sources/lines.py",
    "src/holdfast/data/sources/wikitext.py",
    "src/holdfast/tokenizers/tokenizer.py",
    "tests/data/preprocess/test_sentences.py",
    "tests/data/samples/test_bert.py",
    "tests/data/sources/test_wikipedia.py",
    "tests/tokenizers/test_tokenizers.py",
    "tests/train/run_folder/test_identity.py",
}


def words_of(text: str) -> str:
    """The text in lower case, with identifiers such as `RankStatus` and `stop_at` split into words."""
    text = text.replace(".tell()", "")  # the method of files
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


def pages() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted({*found, *ROOT.glob("*.md"), ROOT / "Makefile"} - {Path(__file__)})


def test_names_and_prose_use_the_words_of_the_field():
    pattern = re.compile(rf"\b({'|'.join(INSTEAD)})\b")
    found = []
    for path in pages():
        if str(path.relative_to(ROOT)) in PENDING:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {word}" for word in pattern.findall(words_of(line))]
    assert not found, "use other words (INSTEAD suggests some):\n" + "\n".join(found)
