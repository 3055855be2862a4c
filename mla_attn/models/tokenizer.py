"""Tokenizers of checkpoint folders, from text to token ids and back.

Supported files are ``tokenizer.json`` (package ``tokenizers``) and the ``tiktoken.model`` of Kimi-K2 and Moonlight
(package ``tiktoken``). A folder with neither is byte-level, id = byte, if its vocabulary is small enough; otherwise it
is refused, and prompts must be token ids.

The begin token follows ``add_bos_token`` of ``tokenizer_config.json``: if true, a prompt begins with ``bos_token``
exactly once; if false, only if its text does. transformers 4 and llama.cpp do the same. transformers 5 uses only
``tokenizer.json``, and DeepSeek's does not add the token with which the models were trained. Without ``add_bos_token``
the tokenizer's own file decides. The command line adds nothing.
"""

import base64
import binascii
import codecs
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mla_attn.checks import INT32_MAX, check_integers
from mla_attn.models.files import CheckpointError, exists, open_file, read_bytes, read_json
from mla_attn.models.keys import ADDED_TOKEN, BEGIN_TOKEN, SHAPES, TIKTOKEN
from mla_attn.models.settings import TOKEN_TEXT, read_settings, section
from mla_attn.text import shown

END_OF_BYTES = 256  # ids from here on are special tokens of a byte-level checkpoint, and have no text
LARGEST_BYTE_LEVEL = 512  # largest vocabulary of such a checkpoint
MOST_TOKENIZER_BYTES = 1 << 30
NOT_READ = ("*.model", "*.tiktoken", "*.spm", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")


@runtime_checkable
class TextStream(Protocol):
    """Incremental decoder of one request; the texts that it returns concatenate to ``decode`` of all tokens."""

    def __call__(self, tokens: Sequence[int]) -> str:
        """Returns the text that is complete after the next tokens; incomplete characters are held back."""
        ...

    def finish(self) -> str:
        """Returns the remaining text after the last token."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of tokenizers that ``load_tokenizer`` returns."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, including the begin token if the checkpoint requires it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; special tokens have no text."""
        ...

    def stream(self) -> TextStream:
        """Creates an incremental decoder for one request."""
        ...


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: a file is damaged or of an unsupported kind, or there is no tokenizer.
        ImportError: the package that the file needs is not installed.
    """
    folder = Path(folder)
    config = _read_config(folder / "tokenizer_config.json")
    if exists(folder / "tokenizer.json"):
        return FileTokenizer.load(folder / "tokenizer.json", config)
    if exists(folder / "tiktoken.model") and config.get("tokenizer_class") == "TikTokenTokenizer":
        return TiktokenTokenizer(folder / "tiktoken.model", config)
    for pattern in NOT_READ:
        for file in sorted(folder.glob(pattern)):
            raise CheckpointError(
                f"{file} is not read: give prompts as token ids (--prompt-ids), or put the same tokenizer's "
                "tokenizer.json beside it"
            )
    return _byte_tokenizer(folder, config)


def tokenizer_or_ids(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a checkpoint folder or, if it cannot be used, one that raises the reason for texts."""
    try:
        return load_tokenizer(path)
    except (ValueError, ImportError) as reason:
        return IdTokenizer(reason)


def encode(prompt: str, tokenizer: Tokenizer | None) -> list[int]:
    """Returns the token ids of a prompt; raises ValueError if the engine has no tokenizer."""
    if tokenizer is None:
        raise ValueError(
            f"prompt={shown(prompt)} is text, must be token ids: the engine has no tokenizer, give it one "
            "(tokenizer=load_tokenizer(path)) or make it by Engine.from_checkpoint(path)"
        )
    return tokenizer.encode(prompt)


def _read_config(file: Path) -> dict[str, Any]:
    """Reads ``tokenizer_config.json``, with ``bos_token`` as text or None; returns {} if there is no file."""
    if not exists(file):
        return {}
    try:
        return read_settings(read_json(file), BEGIN_TOKEN | TIKTOKEN)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


class _BeginToken:
    """Adds the begin token to prompts exactly once, or removes one that a template has added.

    Args:
        config: result of ``_read_config``.
        find: function from a token's text to its id, or None if the vocabulary does not have it.
        file: file of the vocabulary, for messages.
    """

    def __init__(self, config: Mapping[str, Any], find: Callable[[str], int | None], file: Path):
        self.wanted, token = config.get("add_bos_token"), config.get("bos_token")
        self.id = None if token is None else find(token)
        if self.wanted and self.id is None:
            raise CheckpointError(
                f"{file} has no token bos_token={shown(token)}, but tokenizer_config.json adds it to prompts"
            )

    def apply(self, ids: list[int], plain: list[int]) -> list[int]:
        """Returns ``ids`` with or without the begin token; ``plain`` are the text's ids without a template."""
        if self.wanted is None or self.id is None:
            return ids
        begins = [next((n for n, token in enumerate(each) if token != self.id), len(each)) for each in (ids, plain)]
        own = ids[max(begins[0] - begins[1], 0) :]
        return own if not self.wanted or begins[1] else [self.id, *own]


class IdTokenizer:
    """A tokenizer that shows ids as numbers, for a checkpoint whose tokenizer cannot be used.

    Args:
        reason: the exception that says why; ``encode`` raises it.
    """

    def __init__(self, reason: Exception):
        self.reason = reason

    def encode(self, text: str) -> list[int]:
        raise self.reason

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"{token} " for token in tokens)

    def stream(self) -> TextStream:
        return _FileStream(self.decode)


class ByteTokenizer:
    """A tokenizer with UTF-8 bytes as ids 0 to 255.

    Args:
        begin: ids at the beginning of every prompt.
    """

    def __init__(self, begin: tuple[int, ...] = ()):
        self._begin = begin

    def encode(self, text: str) -> list[int]:
        return [*self._begin, *_check_text(text).encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._bytes(tokens).decode(errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream(self._bytes)

    @staticmethod
    def _bytes(tokens: Sequence[int]) -> bytes:
        return bytes(t for t in _check_ids(tokens) if t < END_OF_BYTES)


def _byte_tokenizer(folder: Path, config: Mapping[str, Any]) -> ByteTokenizer:
    file = folder / "config.json"
    try:
        model = read_settings(read_json(file), {name: SHAPES[name] for name in ("vocab_size", "bos_token_id")})
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if model["vocab_size"] > LARGEST_BYTE_LEVEL:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and vocab_size={model['vocab_size']} is too large for bytes as ids: give "
            "prompts as token ids (--prompt-ids)"
        )
    if not config.get("add_bos_token"):
        return ByteTokenizer()
    if model["bos_token_id"] is None:
        raise CheckpointError(f"{file} has no bos_token_id, but tokenizer_config.json adds one to prompts")
    return ByteTokenizer((model["bos_token_id"],))


class FileTokenizer:
    """The tokenizer of a Hugging Face ``tokenizer.json``, which adds special tokens as the file says.

    Args:
        tokenizer: a tokenizer of the package ``tokenizers``.
        begin: handling of the begin token; None to follow the file.
        file: the file, for messages.
    """

    def __init__(self, tokenizer, begin: _BeginToken | None = None, file: Path | None = None):
        self._tokenizer, self._begin, self._file = tokenizer, begin, file

    @classmethod
    def load(cls, file: Path, config: Mapping[str, Any]) -> "FileTokenizer":
        try:
            import tokenizers  # pyright: ignore[reportMissingImports] (an extra)
        except ImportError as error:
            raise ImportError(f"{file} needs the tokenizers package: pip install 'mla-attn[tokenizers]'") from error
        text = read_bytes(file, most=MOST_TOKENIZER_BYTES)
        tokenizer = _guarded(file, lambda: tokenizers.Tokenizer.from_buffer(text))
        tokenizer.no_truncation()  # both settings may remain from training
        tokenizer.no_padding()
        return cls(tokenizer, _BeginToken(config, tokenizer.token_to_id, file), file)

    def encode(self, text: str) -> list[int]:
        ids = self._ids(_check_text(text))
        if self._begin is None or self._begin.wanted is None:
            return ids
        return self._begin.apply(ids, self._ids(text, add_special_tokens=False))

    def _ids(self, text: str, **options: bool) -> list[int]:
        return _guarded(self._file, lambda: self._tokenizer.encode(text, **options).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        tokens = _check_ids(tokens)
        return _guarded(self._file, lambda: self._tokenizer.decode(tokens))

    def stream(self) -> TextStream:
        return _FileStream(self.decode)


def _check_text(text: str) -> str:
    """Checks a prompt, so that later exceptions are due to the file."""
    if not isinstance(text, str):
        raise ValueError(f"text={shown(text)} must be a string")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"text={shown(text)} must be text: half a surrogate pair is none")
    return text


def _check_ids(tokens: Sequence[int]) -> list[int]:
    """Checks token ids, so that later exceptions are due to the file."""
    ids = check_integers("tokens", tokens)
    if ids and not 0 <= min(ids) <= max(ids) <= INT32_MAX:
        raise ValueError(f"tokens hold {shown(min(ids) if min(ids) < 0 else max(ids))}, must be 0 to {INT32_MAX}")
    return ids


def _guarded(file: Path | None, call: Callable[[], Any]) -> Any:
    """Calls ``call`` and converts its errors. The package raises plain ``Exception`` for any invalid file, and a
    ``BaseException`` if its Rust code panics."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{file} cannot be used: {' '.join(str(error).split())}") from error


class TiktokenTokenizer:
    """The tokenizer of a ``tiktoken.model`` (Kimi-K2, Moonlight), which has one token per line, in base64 with its id.

    Special tokens have the ids after these; ``added_tokens_decoder`` of ``tokenizer_config.json`` names them. The file
    does not say how text is split before bytes are merged. ``PATTERN`` and the other constants are from the code
    published with these checkpoints (``tokenization_kimi.py``, ``tokenization_moonshot.py``), which is the same in all.
    """

    _BIG = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    _SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    _BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    PATTERN = "|".join(
        [
            r"[\p{Han}]+",
            f"{_BEFORE}{_BIG}*{_SMALL}+{_AFTER}",
            f"{_BEFORE}{_BIG}+{_SMALL}*{_AFTER}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
    RESERVED = 256  # special tokens, including those without a name
    LONGEST_TEXT, LONGEST_RUN = 400_000, 25_000  # characters at a time; consecutive spaces or non-spaces

    def __init__(self, file: Path, config: Mapping[str, Any]):
        try:
            import tiktoken  # pyright: ignore[reportMissingImports] (an extra)
        except ImportError as error:
            raise ImportError(f"{file} needs the tiktoken package: pip install 'mla-attn[tokenizers]'") from error
        ranks = _read_ranks(file)
        names = _added_tokens(file.parent / "tokenizer_config.json", config, len(ranks))
        first = len(ranks)
        special = {names.get(i, (f"<|reserved_token_{i}|>", True))[0]: i for i in range(first, first + self.RESERVED)}
        self._texts = {rank: token for token, rank in ranks.items()}  # texts by id, of tokens that have one
        self._texts |= {token: text.encode() for token, (text, is_special) in names.items() if not is_special}
        self._encoding = _guarded(
            file,
            lambda: tiktoken.Encoding(file.name, pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=special),
        )
        self._file, self._begin = file, _BeginToken(config, special.get, file)

    def encode(self, text: str) -> list[int]:
        text = _check_text(text)

        def encode_all() -> list[int]:
            parts = (self._encoding.encode(part, allowed_special="all") for part in self._parts(text))
            return [token for part in parts for token in part]

        ids = _guarded(self._file, encode_all)
        return self._begin.apply(ids, ids)

    def _parts(self, text: str) -> Iterator[str]:
        """Splits a text where the published code splits it, because tiktoken fails on long runs."""
        for begin in range(0, len(text), self.LONGEST_TEXT):
            part, last = text[begin : begin + self.LONGEST_TEXT], 0
            for run in re.finditer(r"\s+|\S+", part):
                for cut in range(run.start() + self.LONGEST_RUN, run.end(), self.LONGEST_RUN):
                    yield part[last:cut]
                    last = cut
            yield part[last:]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._bytes(tokens).decode(errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream(self._bytes)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        tokens = _check_ids(tokens)
        return b"".join(self._texts.get(token, b"") for token in tokens)


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    with open_file(file) as (opened, size):
        if size > MOST_TOKENIZER_BYTES:
            raise CheckpointError(f"{file} has {size} bytes, must have at most {MOST_TOKENIZER_BYTES}")
        for number, line in enumerate(opened, start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise CheckpointError(f"{file} line {number} must be a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file} is corrupt: its {len(ranks)} tokens must have the ranks 0 to {len(ranks) - 1}")
    if missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{file} is corrupt: {missing} of the 256 bytes are no token of it")
    return ranks


def _added_tokens(file: Path, config: Mapping[str, Any], first: int) -> dict[int, tuple[str, bool]]:
    """Text of the tokens from id ``first`` on, and whether they are special; special tokens decode to no text."""
    try:
        added = config.get("added_tokens_decoder") or {}
        names = {}
        for key, entry in added.items():
            label = f"added_tokens_decoder {key}"
            number = int(key) if re.fullmatch(r"[0-9]{1,9}", key) else -1
            if not first <= number < first + TiktokenTokenizer.RESERVED:
                last = first + TiktokenTokenizer.RESERVED - 1
                raise ValueError(f"{label} must be an id from {first}, after those of tiktoken.model, to {last}")
            special = read_settings(section(label, entry), ADDED_TOKEN, within=label)["special"]
            names[number] = (TOKEN_TEXT(label, entry), special)
        if len({text for text, _ in names.values()}) < len(names):
            raise ValueError("added_tokens_decoder has two ids for one text")
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return names


class _ByteStream:
    """A ``TextStream`` for tokens that are bytes."""

    def __init__(self, to_bytes: Callable[[Sequence[int]], bytes]):
        self._bytes, self._decoder = to_bytes, codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __call__(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(self._bytes(tokens))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FileStream:
    """A ``TextStream`` for a function that decodes.

    ``tokenizers.decoders.DecodeStream`` is similar, but has no ``finish``, and in vocabularies with byte fallback
    raises on bytes that are not UTF-8. For such bytes a stream cannot equal ``decode``, which replaces the whole run of
    bytes around an invalid one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode, self._seen = decode, []
        # The last returned text is seen[begin:shown]; it is kept because decoding depends on preceding tokens.
        self._begin = self._shown = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self._seen.extend(tokens)
        text = self._new_text()
        if text.endswith("\ufffd"):  # an incomplete character
            return ""
        self._begin, self._shown = self._shown, len(self._seen)
        return text

    def finish(self) -> str:
        text, self._shown = self._new_text(), len(self._seen)
        return text

    def _new_text(self) -> str:
        return self._decode(self._seen[self._begin :])[len(self._decode(self._seen[self._begin : self._shown])) :]
