"""Text to token ids and back: the checkpoint's own tokenizer.json, or bytes where it has none."""

import codecs
import pathlib
from collections.abc import Callable

END_OF_BYTES = 256  # ids from here on are special tokens of a byte-level checkpoint, and have no text


def load_tokenizer(folder: str | pathlib.Path) -> "ByteTokenizer | FileTokenizer":
    """The tokenizer of a checkpoint folder; a folder without ``tokenizer.json`` is byte-level: id = byte."""
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.exists():
        return ByteTokenizer()
    try:
        import tokenizers  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ImportError(f"{path} needs the tokenizers package: pip install 'mla-attn[tokenizers]'") from error
    return FileTokenizer(tokenizers.Tokenizer.from_file(str(path)))


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; nothing is prepended."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < END_OF_BYTES).decode(errors="replace")

    def stream(self) -> Callable[[list[int]], str]:
        """A function that takes the next tokens of one request and returns the text that is complete with them."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda tokens: decoder.decode(bytes(t for t in tokens if t < END_OF_BYTES))


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``, special tokens as it adds them."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def stream(self) -> Callable[[list[int]], str]:
        """As of ByteTokenizer."""
        seen: list[int] = []
        begin = shown = 0  # what was shown last is seen[begin:shown]: how tokens read depends on those before them

        def add(tokens: list[int]) -> str:
            nonlocal begin, shown
            seen.extend(tokens)
            before, text = self.decode(seen[begin:shown]), self.decode(seen[begin:])
            if text.endswith("\ufffd"):  # a character cut in half, until its last token comes
                return ""
            begin, shown = shown, len(seen)
            return text[len(before) :]

        return add
