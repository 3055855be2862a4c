"""Text to ids and back, whole and as it comes."""

import builtins
import json
import types

import pytest

from checkpoints import V3
from mla_attn.models.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer

TEXT = "naïve 漢字 🙂\n"


def test_bytes_are_ids():
    tokenizer = load_tokenizer(V3)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("hé") == [104, 195, 169]
    assert tokenizer.decode([104, 195, 169]) == "hé"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("") == []


def test_special_tokens_have_no_text():
    assert ByteTokenizer().decode([256, 104, 300, 105, 257]) == "hi"
    assert ByteTokenizer().stream()([256, 104, 257]) == "h"


def test_wrong_bytes_are_shown_as_such():
    assert ByteTokenizer().decode([104, 195]) == "h\ufffd"
    add = ByteTokenizer().stream()
    assert add([104, 195]) == "h"
    assert add([104]) == "\ufffdh"


class Pieces:
    """What FileTokenizer wraps: one id for the whole of a few words, bytes for the rest; a space goes before a word
    unless it is the first, as SentencePiece has it."""

    def __init__(self):
        self.words = {300: "the", 301: "cat"}

    def encode(self, text):
        return types.SimpleNamespace(ids=list(text.encode()))

    def decode(self, ids):
        parts = [b" " + self.words[i].encode() if i in self.words else bytes([i]) for i in ids]
        return b"".join(parts).removeprefix(b" ").decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), FileTokenizer(Pieces())], ids=["bytes", "file"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stream_shows_whole_characters(tokenizer, size):
    tokens = tokenizer.encode(TEXT)
    add = tokenizer.stream()
    shown = [add(tokens[begin : begin + size]) for begin in range(0, len(tokens), size)]
    assert "".join(shown) == TEXT
    assert not any("\ufffd" in text for text in shown)
    if size == 1:
        assert shown[2:4] == ["", "ï"]
        assert shown.count("") == len(TEXT.encode()) - len(TEXT)


def test_a_stream_keeps_the_spaces_between_words():
    add = FileTokenizer(Pieces()).stream()
    assert [add([token]) for token in (300, 301, 195, 169, 300)] == ["the", " cat", "", "é", " the"]


def test_streams_do_not_share():
    tokenizer = ByteTokenizer()
    one, other = tokenizer.stream(), tokenizer.stream()
    assert one([195]) == ""
    assert other([104]) == "h"
    assert one([169]) == "é"


def test_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="an extra")
    vocab = {word: i for i, word in enumerate(("[UNK]", "hello", "world"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world") == [1, 2]
    assert tokenizer.decode([2, 1]) == "world hello"
    add = tokenizer.stream()
    assert add([1]) + add([2]) == "hello world"


def test_a_tokenizer_file_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"tokenizer.json needs the tokenizers package: pip install 'mla-attn\[tok"):
        load_tokenizer(tmp_path)
