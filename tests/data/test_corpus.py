"""Reading texts: what becomes a document, in which order, and which texts are refused."""

import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import corpus as corpus_module
from data.corpus import Corpus, ReadingReport
from data.errors import CorpusError


def read(*inputs: Path, text_field: str = "text") -> tuple[list[str], ReadingReport]:
    report = ReadingReport()
    documents = Corpus(inputs, text_field).documents(report)
    return ["".join(document) for document in documents], report


def test_without_input_the_corpus_is_the_standard_library_without_its_tests():
    library = Path(sysconfig.get_paths()["stdlib"])
    files = Corpus().files
    assert library / "argparse.py" in files
    assert library / "json" / "decoder.py" in files
    assert {path.suffix for path in files} == {".py"}
    folders = {folder for path in files for folder in path.relative_to(library).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(tmp_path):
    for name in ("b.md", "a.txt", "sub/d.py", "sub/c.txt", ".git/x.txt", ".x.txt", "photo.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    documents, report = read(tmp_path)
    assert documents == ["a.txt", "b.md", "sub/c.txt", "sub/d.py"]
    assert report.documents == 4


def test_a_file_named_itself_is_text_whatever_its_kind_and_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "notes").write_text("notes")
    documents, _ = read(tmp_path / "notes", tmp_path, tmp_path / "a.txt")
    assert documents == ["notes", "a"]


def test_each_json_line_is_a_document_of_the_named_field(tmp_path):
    lines = [{"body": "first\nline"}, {"body": "zweite ü"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    documents, _ = read(path, text_field="body")
    assert documents == ["first\nline", "zweite ü"]


def test_json_lines_without_text_are_skipped_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": ""}\n{"text": null}\n{"other": 1}\n\n{"text": " \\n"}\n{"text": "x"}\n'
    )
    documents, report = read(path)
    assert documents == ["x"]
    assert (report.documents, report.skipped) == (1, 5)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["text"]', "is no JSON object but list"),
        ('{"text": 5}', "is no text but int"),
    ],
)
def test_a_bad_json_line_is_refused_by_file_and_number(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=rf"a\.jsonl line 2.*{reason}"):
        read(path)


def test_a_json_line_too_long_to_be_held_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "LONGEST_JSON_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 200}))
    with pytest.raises(CorpusError, match="line 1 is longer than"):
        read(path)


def test_half_a_character_in_json_is_replaced_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}')
    (document,), report = read(path)
    assert document.replace("\ufffd", "") == "ab"
    assert report.replaced == document.count("\ufffd") > 0


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    text = '{"text": "hi"}'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    documents, _ = read(tmp_path)
    assert documents == ["hi" if name == "a.jsonl" else text]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_utf_16_and_utf_32_are_refused_with_the_way_to_convert_them(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("hello", encoding=encoding)
    with pytest.raises(CorpusError, match=rf"a\.txt is {encoding.upper()} text.*iconv"):
        read(tmp_path)


def test_bytes_that_are_not_utf8_are_replaced_counted_and_located_once(tmp_path):
    (tmp_path / "a.txt").write_text("a replacement character \ufffd of its own", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes("Fußgänger".encode("latin-1"))
    (tmp_path / "c.txt").write_bytes(b"\xff\xfa")
    documents, report = read(tmp_path)
    assert documents[1:] == ["Fu\ufffdg\ufffdnger", "\ufffd\ufffd"]
    assert report.replaced == 4
    assert report.first_replaced == str(tmp_path / "b.txt")


def test_documents_without_text_are_skipped_and_counted(tmp_path):
    for number, text in enumerate(["", "x", " \n\t", "\u3000\u00a0", "y"]):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    documents, report = read(tmp_path)
    assert documents == ["x", "y"]
    assert (report.documents, report.skipped, report.characters) == (2, 3, 2)


def test_line_ends_and_nul_characters_stay_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\0\n\n")
    documents, _ = read(tmp_path)
    assert documents == ["one\r\ntwo\rthree\n\0\n\n"]


@given(data=st.lists(st.sampled_from([b"a", b" ", b"\n", b"\xe4\xbd\xa0", b"\x80", b"\xf0\x9f"])))
def test_pieces_are_bounded_and_add_up_to_the_document(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(b"x" + b"".join(data))
    report = ReadingReport()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE_BYTES", 8)
        pieces = list(Corpus([path]).pieces(report))
    whole = path.read_bytes().decode("utf-8", "replace")
    assert "".join(pieces) == whole
    assert all(0 < len(piece) <= 8 for piece in pieces)
    assert report.replaced == whole.count("\ufffd")


def test_a_long_document_is_cut_after_lines_or_before_spaces(tmp_path):
    (tmp_path / "lines.txt").write_text("a line of text\n" * 20_000)
    (tmp_path / "words.txt").write_text(" word" * 50_000)
    corpus = Corpus([tmp_path])
    lines, words = (list(document) for document in corpus.documents(ReadingReport()))
    assert len(lines) > 1
    assert all(piece.endswith("\n") for piece in lines)
    assert len(words) > 1
    assert all(piece.startswith(" ") for piece in words)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"nothing\.txt: no such file or folder"):
        Corpus([tmp_path / "nothing.txt"])


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    with pytest.raises(CorpusError, match="no text in this folder"):
        Corpus([tmp_path])


def test_a_pipe_is_refused_because_a_corpus_is_read_more_than_once():
    with pytest.raises(CorpusError, match="not a plain file"):
        Corpus([Path("/dev/null")])


def test_only_empty_documents_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("  \n")
    (tmp_path / "b.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(
        CorpusError, match=r"no document with text among 2 in 2 files.*--text_field"
    ):
        read(tmp_path)
