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
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {word}" for word in pattern.findall(words_of(line))]
    assert not found, "use other words (INSTEAD suggests some):\n" + "\n".join(found)
