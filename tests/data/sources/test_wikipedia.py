"""A small dump in the real format, with what real dumps have in them, becomes the expected documents and sentences."""

import bz2
import json
from html import escape
from pathlib import Path

import pytest

from holdfast import preprocess
from holdfast.data.indexed import IndexedDataset
from holdfast.data.preprocess.sentences import SentenceSplitter
from holdfast.data.sources import InputFile, Unit
from holdfast.data.sources.inputs import find_inputs
from holdfast.data.sources.wikipedia import dropped_namespaces, read, units
from holdfast.system.errors import HoldfastError
from tests.data.conftest import TokenizerFiles

HEADER = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <namespaces>
      <namespace key="-2" case="first-letter">Medium</namespace>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""


def page(title: str, text: str, number: int = 1, ns: int = 0, redirect: str = "", model: str = "wikitext") -> str:
    target = f'\n    <redirect title="{escape(redirect)}" />' if redirect else ""
    return f"""  <page>
    <title>{escape(title)}</title>
    <ns>{ns}</ns>
    <id>{number}</id>{target}
    <revision>
      <id>{1000 + number}</id>
      <contributor><username>Someone</username><id>7</id></contributor>
      <model>{model}</model>
      <format>text/x-wiki</format>
      <text bytes="{len(text.encode())}" sha1="abc" xml:space="preserve">{escape(text)}</text>
      <sha1>abc</sha1>
    </revision>
  </page>
"""


CATS = """{{Infobox|name={{PAGENAME}}}}
'''Cats''' ({{IPA|x}}) are [[animal]]s.<ref>A book.</ref> They purr &amp; sleep.
{| class="wikitable"
| a || b
|}
[[Datei:Cat.jpg|mini|A [[cat]]]]
== See also ==
* [[Dog|Dogs]] bark.
[[Kategorie:Cats]]"""

PAGES = [
    page("Cats", CATS, 1),
    page("Cat", "#REDIRECT [[Cats]]", 2, redirect="Cats"),
    page("Talk:Cats", "Not an article. Really not.", 3, ns=1),
    page("Old redirect", "#redirect [[Cats]]", 4),
    page("Wörter & \"Zeichen\"", "Straße über 5&nbsp;km. Ende <nowiki>[[so]]</nowiki>.", 5),
    page("Script", "alert(1)", 6, model="javascript"),
    page("Nothing left", "{{Disambig}}", 7),
    page("Dogs", "Dogs run. " * 30, 8),
]  # fmt: skip

ARTICLES = [
    ("Cats", "Cats are animals. They purr & sleep.\n\nDogs bark."),
    ('Wörter & "Zeichen"', "Straße über 5 km. Ende [[so]]."),
    ("Dogs", ("Dogs run. " * 30).strip()),
]


def multistream(*contents: str) -> bytes:
    """A dump as Wikimedia writes it: header, groups of pages and end, each a bz2 stream of its own."""
    return b"".join(bz2.compress(content.encode()) for content in contents)


def usual() -> bytes:
    return multistream(HEADER, "".join(PAGES[:3]), "".join(PAGES[3:6]), "".join(PAGES[6:]), "</mediawiki>\n")


def cut_into(file: InputFile, unit_bytes: int) -> list[Unit]:
    return list(units(file, unit_bytes))


def articles_of(path: Path, unit_bytes: int = 4) -> tuple[list[tuple[str, str]], list[str]]:
    """Title and text of every article, over all units, and the reasons of bad ones."""
    (file,) = find_inputs([path])
    assert file.source == "wikipedia"
    found, bad = [], []
    for unit in cut_into(file, unit_bytes):
        for batch in read(unit, ["title", "text"]):
            found += list(zip(*batch.values, strict=True))
            bad += [line.reason for line in batch.bad]
    return found, bad


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_articles_come_out_of_a_multistream_dump(tmp_path: Path) -> None:
    dump = write(tmp_path / "dewiki-pages-articles-multistream.xml.bz2", usual())
    assert articles_of(dump) == (ARTICLES, [])
    assert dropped_namespaces(str(dump)) >= {"datei", "kategorie", "file", "image", "category"}
    assert len(cut_into(find_inputs([dump])[0], 4)) == 5


def test_a_folder_brings_its_dumps_and_not_the_tables_of_their_streams(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.xml", "c-multistream.xml.bz2", "c-multistream-index.txt.bz2", "d.xml.gz", "e.html"):
        (tmp_path / name).write_bytes(b"")
    found = find_inputs([tmp_path])
    assert [Path(file.path).name for file in found] == ["a.jsonl", "b.xml", "c-multistream.xml.bz2", "d.xml.gz"]
    assert [file.source for file in found[1:]] == ["wikipedia"] * 3


@pytest.mark.parametrize("unit_bytes", [1, 7, 100, 1000, 10**6])
def test_cuts_of_plain_xml_may_fall_anywhere(tmp_path: Path, unit_bytes: int) -> None:
    dump = write(tmp_path / "dump.xml", (HEADER + "".join(PAGES) + "</mediawiki>\n").encode())
    assert articles_of(dump, unit_bytes) == (ARTICLES, [])


@pytest.mark.parametrize("piece", [50, 333, 1500])
def test_streams_may_end_in_the_middle_of_pages(tmp_path: Path, piece: int) -> None:
    text = (HEADER + "".join(PAGES) + "</mediawiki>\n").encode()
    streams = [bz2.compress(text[at : at + piece]) for at in range(0, len(text), piece)]
    dump = write(tmp_path / "pbzip2.xml.bz2", b"".join(streams))
    assert articles_of(dump) == (ARTICLES, [])


def test_single_stream_is_read_by_one_and_shared_out(tmp_path: Path) -> None:
    dump = write(tmp_path / "single.xml.bz2", bz2.compress((HEADER + "".join(PAGES) + "</mediawiki>").encode()))
    assert articles_of(dump, 300) == (ARTICLES, [])
    assert {unit.how for unit in cut_into(find_inputs([dump])[0], 300)} == {"fed"}


def truncated() -> bytes:
    """The usual dump, cut off in the middle of its last pages."""
    whole = multistream(HEADER, "".join(PAGES[:3]), "".join(PAGES[3:6]))
    return whole + multistream("".join(PAGES[6:]))[:-40]


def test_truncated_last_stream_is_reported_and_loses_its_own_pages_only(tmp_path: Path) -> None:
    found, bad = articles_of(write(tmp_path / "cut.xml.bz2", truncated()))
    assert found == ARTICLES[:2]
    assert len(bad) == 1
    assert "ends in the middle" in bad[0]


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("unit_bytes", [4, 10**6])
def test_damaged_stream_is_reported_and_does_not_lose_the_others(tmp_path: Path, victim: int, unit_bytes: int) -> None:
    streams = [HEADER, PAGES[0] + PAGES[1], PAGES[4], PAGES[7], "</mediawiki>\n"]
    encoded = [bytearray(bz2.compress(stream.encode())) for stream in streams]
    encoded[victim][len(encoded[victim]) // 2] ^= 0xFF
    position = sum(len(stream) for stream in encoded[:victim])
    dump = write(tmp_path / "damaged.xml.bz2", b"".join(encoded))
    found, bad = articles_of(dump, unit_bytes)
    expected = [article for number, article in enumerate(ARTICLES) if number + 1 != victim]
    assert [title for title, _ in found] == [title for title, _ in expected]
    assert len(bad) == 1
    assert f"the bz2 stream at byte {position:,} is damaged" in bad[0]


def test_garbage_between_streams_is_reported(tmp_path: Path) -> None:
    parts = [multistream(HEADER, PAGES[0]), b"not bz2 at all", multistream(PAGES[4], PAGES[7], "</mediawiki>\n")]
    found, bad = articles_of(write(tmp_path / "garbage.xml.bz2", b"".join(parts)))
    assert found == ARTICLES
    assert len(bad) == 1


def test_page_over_several_units_is_read_once(tmp_path: Path) -> None:
    long = page("Long", "Word after word. " * 20_000)
    text = (HEADER + PAGES[0] + long + PAGES[7] + "</mediawiki>\n").encode()
    streams = [bz2.compress(text[at : at + 40_000]) for at in range(0, len(text), 40_000)]
    found, bad = articles_of(write(tmp_path / "long.xml.bz2", b"".join(streams)))
    assert [title for title, _ in found] == ["Cats", "Long", "Dogs"]
    assert found[1][1].count("Word") == 20_000
    assert not bad


def test_history_dump_gives_the_last_revision(tmp_path: Path) -> None:
    twice = page("Cats", "Old text.").replace("</revision>", "</revision><revision><text>New text.</text></revision>")
    dump = write(tmp_path / "history.xml", (HEADER + twice + "</mediawiki>").encode())
    assert articles_of(dump) == ([("Cats", "New text.")], [])


def test_key_that_pages_do_not_have_is_refused(tmp_path: Path) -> None:
    (file,) = find_inputs([write(tmp_path / "dump.xml", (HEADER + PAGES[0]).encode())])
    with pytest.raises(HoldfastError, match="its pages have no 'body', only text, title, id"):
        list(read(cut_into(file, 1000)[0], ["body"]))


def test_preprocess_writes_the_sentences_of_a_dump(tmp_path: Path, bert: TokenizerFiles) -> None:
    dump = write(tmp_path / "dump.xml.bz2", usual())
    summary = preprocess(dump, tmp_path / "wiki", **bert.arguments(), split_sentences=True, workers=2)  # type: ignore[arg-type]
    assert summary.documents == 3
    tokenizer = bert.build()
    data = IndexedDataset(summary.outputs[0])
    sentences = [[sequence.tolist() for sequence in data.document(number)] for number in range(3)]
    assert summary.outputs[0].endswith("_text_sentence")
    expected = ["Cats are animals.", "They purr & sleep.", "Dogs bark."]
    assert sentences[0] == [tokenizer.encode(sentence) for sentence in expected]
    splitter = SentenceSplitter("english")
    assert sentences[1] == [tokenizer.encode(sentence) for sentence in splitter.split(ARTICLES[1][1])]


def test_preprocess_reports_a_damaged_stream_and_continues_with_skip(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    dump = write(tmp_path / "dump.xml.bz2", truncated())
    arguments = small_bpe.arguments()
    with pytest.raises(HoldfastError, match=r"the bz2 stream at byte .* ends in the middle.*--on-bad-line skip"):
        preprocess(dump, tmp_path / "wiki", **arguments, workers=2)  # type: ignore[arg-type]
    summary = preprocess(dump, tmp_path / "wiki2", **arguments, workers=2, on_bad_line="skip", append_eod=True)  # type: ignore[arg-type]
    assert summary.bad_lines == 1
    assert summary.documents == 2
    (bad,) = [json.loads(line) for line in Path(f"{tmp_path}/wiki2.bad.jsonl").read_text().splitlines()]
    assert bad["file"] == str(dump)


def test_titles_are_kept_as_a_key_of_their_own(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    dump = write(tmp_path / "dump.xml.bz2", usual())
    summary = preprocess(dump, tmp_path / "wiki", **small_bpe.arguments(), json_keys=("text", "title"), workers=1)  # type: ignore[arg-type]
    titles = IndexedDataset(summary.outputs[1])
    tokenizer = small_bpe.build()
    assert [tokenizer.decode(titles[number].tolist()) for number in range(3)] == [title for title, _ in ARTICLES]
