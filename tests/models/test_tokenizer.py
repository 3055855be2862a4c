"""Text to ids and back, whole and as it comes."""

import base64
import builtins
import json
import types

import pytest

from checkpoints import V3
from mla_attn.models import CheckpointError
from mla_attn.models.tokenizer import ByteTokenizer, FileTokenizer, IdTokenizer, TiktokenTokenizer, load_tokenizer

TEXT = "naïve 漢字 🙂\n"


def write(folder, name, data):
    (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))


# Bytes.


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


def test_bytes_with_a_begin_token(tmp_path):
    write(tmp_path, "tokenizer_config.json", {"add_bos_token": True})
    write(tmp_path, "config.json", {"vocab_size": 258, "bos_token_id": 256})
    assert load_tokenizer(tmp_path).encode("hi") == [256, 104, 105]
    write(tmp_path, "config.json", {"vocab_size": 258})
    with pytest.raises(CheckpointError, match=r"config\.json has no bos_token_id, but tokenizer_config\.json adds"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tiktoken.model", "tokenizer.model", "spiece.model", "qwen.tiktoken", "vocab.json", "tekken.json"]
)
def test_other_tokenizers_are_refused_by_name(tmp_path, name):
    write(tmp_path, "config.json", {"vocab_size": 258})
    write(tmp_path, name, "")
    with pytest.raises(CheckpointError, match=rf"{name} is not read: give prompts as token ids \(--prompt-ids\)"):
        load_tokenizer(tmp_path)


def test_bytes_need_a_small_vocabulary(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"config\.json is missing"):
            load_tokenizer(folder)
    write(tmp_path, "config.json", {})
    with pytest.raises(CheckpointError, match=r"config\.json: vocab_size is missing"):
        load_tokenizer(tmp_path)
    write(tmp_path, "config.json", {"vocab_size": 512})
    assert load_tokenizer(tmp_path).encode("h") == [104]
    write(tmp_path, "config.json", {"vocab_size": 163840})
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and vocab_size=163840 is too large.*--prompt-ids"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"vocab_size": "258"}'),
        ("tokenizer_config.json", '{"add_bos_token": "true"}'),
        ("tokenizer_config.json", '{"bos_token": {"text": "<s>"}}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"add_bos_token": true'),
    ],
)
def test_damaged_configs(tmp_path, name, text):
    write(tmp_path, name, text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


# Streams.


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


both = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), FileTokenizer(Pieces())], ids=["bytes", "file"])


@both
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
    assert add.finish() == ""


@both
def test_a_stream_ends_with_what_waits(tokenizer):
    """A length limit may cut a character in half."""
    for cut in range(len(TEXT.encode()) + 1):
        tokens, add = tokenizer.encode(TEXT)[:cut], tokenizer.stream()
        assert "".join(add([token]) for token in tokens) + add.finish() == tokenizer.decode(tokens)
        assert add.finish() == ""


def test_a_stream_keeps_the_spaces_between_words():
    add = FileTokenizer(Pieces()).stream()
    assert [add([token]) for token in (300, 301, 195, 169, 300)] == ["the", " cat", "", "é", " the"]


def test_streams_do_not_share():
    tokenizer = ByteTokenizer()
    one, other = tokenizer.stream(), tokenizer.stream()
    assert one([195]) == ""
    assert other([104]) == "h"
    assert one([169]) == "é"


def test_ids_in_place_of_text():
    tokenizer = IdTokenizer(CheckpointError("no tokenizer"))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        tokenizer.encode("hi")
    add = tokenizer.stream()
    assert add([1, 22]) + add([3]) + add.finish() == tokenizer.decode([1, 22, 3]) == "1 22 3 "


def wrong_arguments(tokenizer):
    """The argument is named, not the file."""
    for text in ("\udcff", "a\ud800"):
        with pytest.raises(ValueError, match=r"text='.*' must be text: half a surrogate pair") as caught:
            tokenizer.encode(text)
        assert not isinstance(caught.value, CheckpointError)
    for tokens, message in (([-1], "tokens hold -1, must be 0 to"), ([1, 2**40], "tokens hold 1099511627776, must")):
        for decode in (tokenizer.decode, tokenizer.stream()):
            with pytest.raises(ValueError, match=message) as caught:
                decode(tokens)
            assert not isinstance(caught.value, CheckpointError)


def test_wrong_arguments_of_bytes():
    wrong_arguments(ByteTokenizer())


# tokenizer.json.


@pytest.fixture
def tokenizers():
    return pytest.importorskip("tokenizers", reason="an extra")


@pytest.fixture
def byte_level(tokenizers, tmp_path):
    """Writes a folder: id 0 begins, 1 ends, then one id a byte. Returns its tokenizer, changed and with templates."""

    def make(change=lambda tokenizer: None, template=False, **config):
        models, pre, processors = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.processors
        vocab = {"<bos>": 0, "<eos>": 1}
        vocab |= {symbol: number + 2 for number, symbol in enumerate(sorted(pre.ByteLevel.alphabet()))}
        made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        if template:
            made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
        made.add_special_tokens(["<bos>", "<eos>"])
        change(made)
        made.save(str(tmp_path / "tokenizer.json"))
        if config:
            write(tmp_path, "tokenizer_config.json", config)
        return load_tokenizer(tmp_path)

    return make


def test_a_tokenizer_file(tokenizers, tmp_path):
    vocab = {word: i for i, word in enumerate(("[UNK]", "hello", "world"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world") == [1, 2]
    assert tokenizer.decode([2, 1]) == "world hello"
    add = tokenizer.stream()
    assert add([1]) + add([2]) == "hello world"


ADDED = {"__type": "AddedToken", "content": "<bos>", "lstrip": False, "normalized": True}


@pytest.mark.parametrize("template", [False, True], ids=["plain", "template"])
@pytest.mark.parametrize("bos", ["<bos>", ADDED], ids=["text", "dict"])
def test_the_begin_token_comes_once(byte_level, template, bos):
    tokenizer = byte_level(template=template, add_bos_token=True, bos_token=bos)
    for text, want in (("Hi", [0, 41, 74]), ("", [0]), ("<bos>Hi", [0, 41, 74]), ("Hi<bos>", [0, 41, 74, 0])):
        assert tokenizer.encode(text) == want


@pytest.mark.parametrize("template", [False, True], ids=["plain", "template"])
def test_no_begin_token_where_none_is_wanted(byte_level, template):
    tokenizer = byte_level(template=template, add_bos_token=False, bos_token="<bos>")
    for text, want in (("Hi", [41, 74]), ("", []), ("<bos>Hi", [0, 41, 74])):
        assert tokenizer.encode(text) == want


def test_the_file_decides_where_nothing_is_said(byte_level):
    assert byte_level(template=True, bos_token="<bos>").encode("Hi") == [0, 41, 74]
    assert byte_level(template=False, bos_token="<bos>").encode("Hi") == [41, 74]


def test_a_begin_token_that_is_none(byte_level):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has no token bos_token='<s>', but tokenizer_config"):
        byte_level(add_bos_token=True, bos_token="<s>")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has no token bos_token=None"):
        byte_level(add_bos_token=True, bos_token=None)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*bos_token='\\ud800'"):
        byte_level(bos_token="\ud800")  # half of a surrogate pair, which JSON can hold and no text can


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.enable_truncation(8),
        lambda t: t.enable_truncation(8, direction="left"),
        lambda t: t.enable_padding(length=120, pad_id=1, pad_token="<eos>"),
        lambda t: t.enable_padding(pad_to_multiple_of=64, pad_id=1, pad_token="<eos>"),
    ],
)
def test_truncation_and_padding_of_training_are_reset(byte_level, change):
    assert len(byte_level(change).encode("a" * 100)) == 100


def test_wrong_arguments_of_a_file(byte_level):
    wrong_arguments(byte_level())


def test_a_stream_of_any_tokens(byte_level):
    """What models emit need not be UTF-8."""
    tokenizer = byte_level()
    tokens = [(37 * i * i + 11) % 258 for i in range(300)]
    add = tokenizer.stream()
    assert "".join(add([token]) for token in tokens) + add.finish() == tokenizer.decode(tokens)


BROKEN = {
    "half": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a"',
    "empty": "",
    "nested": "[" * 100_000,
    "another type": '{"version": "1.0", "model": {"type": "GPT", "vocab": {}}}',
    "merges of unknown tokens": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
    "ids that are none": '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1.5}, "unk_token": "a"}}',
    "wrong text": "\udcff",
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tokenizer_files(tokenizers, tmp_path, case):
    (tmp_path / "tokenizer.json").write_text(BROKEN[case], errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used: ") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).isprintable()


def test_a_text_that_a_file_cannot_encode(tokenizers, tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used: .*\[UNK\]"):
        load_tokenizer(tmp_path).encode("b")


def test_a_tokenizer_file_that_is_none(tokenizers, tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "package"), [("tokenizer.json", "tokenizers"), ("tiktoken.model", "tiktoken")])
def test_a_tokenizer_file_without_its_package(tmp_path, monkeypatch, name, package):
    write(tmp_path, name, {})
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "TikTokenTokenizer"})
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=rf"{name} needs the {package} package: pip install 'mla-attn\[tokenizers\]"):
        load_tokenizer(tmp_path)


# tiktoken.model.


def ranks(*longer):
    """Lines of a file: the bytes, then longer tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in longer]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


LONGER = ("he", "ll", "hell", "hello", " w", "漢", "12", "123", "1234")
NAMES = {
    "265": {"content": "[BOS]", "special": True},
    "266": {"content": "<|im_end|>", "special": True},
    "270": {"content": "<|tool|>", "special": False},
}
KIMI = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": NAMES}


@pytest.fixture
def kimi(tmp_path):
    pytest.importorskip("tiktoken", reason="an extra")

    def make(text=None, **config):
        write(tmp_path, "tiktoken.model", ranks(*LONGER) if text is None else text)
        write(tmp_path, "tokenizer_config.json", KIMI | config)
        return load_tokenizer(tmp_path)

    return make


def test_a_tiktoken_file(kimi):
    tokenizer = kimi()
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.encode("hello<|im_end|><|tool|>") == [259, 266, 270]
    assert tokenizer.encode("<|reserved_token_267|>") == [267]
    assert tokenizer.decode([265, 259, 270, 267, 266]) == "hello<|tool|>"  # special tokens have no text
    assert tokenizer.decode([10**6, 259]) == "hello"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("") == []
    add, tokens = tokenizer.stream(), tokenizer.encode(TEXT)[:-3]  # in the middle of a character
    assert "".join(add([token]) for token in tokens) + add.finish() == tokenizer.decode(tokens)
    assert kimi(add_bos_token=True).encode("hello") == [265, 259]
    assert kimi(add_bos_token=True).encode("[BOS]hello") == [265, 259]


def test_wrong_arguments_of_tiktoken(kimi):
    wrong_arguments(kimi())


def test_text_is_split_as_published(kimi):
    """What may merge and what may not: digits in threes, Han apart from letters, a space with the word after it."""
    tokenizer = kimi()
    assert tokenizer.encode("1234") == [263, ord("4")]  # never 1234, though the file has it
    assert tokenizer.encode(" world")[0] == 260
    assert tokenizer.encode("漢hello") == [261, 259]
    assert tokenizer.encode("hell漢o") == [258, 261, ord("o")]


def test_long_runs_are_cut_as_published(kimi):
    """tiktoken's regex gives up on them."""
    tokenizer = kimi()
    assert tokenizer.encode("hello" * 5001) == [259] * 5001
    parts = list(tokenizer._parts("a" * 25_001 + " " * 3 + "b" * 50_001 + "c " * 200_000))
    assert [len(part) for part in parts] == [25_000, 25_004, 25_000, 324_996, 75_005]
    assert "".join(parts) == "a" * 25_001 + " " * 3 + "b" * 50_001 + "c " * 200_000


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        ("IQ== 0\nIg== 1\n", {}, r"tiktoken\.model is corrupt: 254 of the 256 bytes are no token of it"),
        ("IQ== 0\nIg==\n", {}, r"tiktoken\.model line 2 must be a token in base64 and its rank"),
        ("IQ== 0\n* 1\n", {}, r"tiktoken\.model line 2 must be a token"),
        (ranks() + "SGk= 300\n", {}, r"tiktoken\.model is corrupt: its 257 tokens must have the ranks 0 to 256"),
        (ranks() + "AA== 256\n", {}, r"tiktoken\.model is corrupt: its 256 tokens must have the ranks 0 to 255"),
        ("", {}, r"tiktoken\.model is corrupt"),
        (None, {"added_tokens_decoder": {}}, None),
        (None, {"added_tokens_decoder": None}, None),
        (None, {"added_tokens_decoder": []}, r"tokenizer_config\.json: added_tokens_decoder=\[\] must be an object"),
        (None, {"tokenizer_class": 5}, r"tokenizer_config\.json: tokenizer_class=5 must be a string"),
        (None, {"added_tokens_decoder": [1]}, r"tokenizer_config\.json: added_tokens_decoder=\[1\] must be an object"),
        (None, {"added_tokens_decoder": {"3": {"content": "x"}}}, "added_tokens_decoder 3 must be an id from 265"),
        (None, {"added_tokens_decoder": {"x": {"content": "x"}}}, "added_tokens_decoder x must be an id from 265"),
        (None, {"added_tokens_decoder": {"265": {}}}, r"added_tokens_decoder 265=\{\} must be a string, or"),
        (None, {"added_tokens_decoder": {n: {"content": "x"} for n in ("265", "266")}}, "two ids for one text"),
        (None, {"bos_token": "<s>", "add_bos_token": True}, r"tiktoken\.model has no token bos_token='<s>'"),
    ],
)
def test_damaged_tiktoken_files(kimi, text, config, message):
    if message is None:
        assert kimi(text, **config).encode("hello") == [259]
        return
    with pytest.raises(CheckpointError, match=message):
        kimi(text, **config)


def test_another_class_of_tokenizer(kimi):
    with pytest.raises(CheckpointError, match=r"tiktoken\.model is not read"):
        kimi(tokenizer_class="QWenTokenizer")
