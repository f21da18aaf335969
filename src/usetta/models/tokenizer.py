"""CLIP's byte-pair encoding, equal token by token to OpenAI's `SimpleTokenizer`.

Cleaning (ftfy, HTML entities twice, white space, lower case) and the split into words follow OpenAI; the merging runs
in Hugging Face `tokenizers`. A `tokenizer.json` contributes its vocabulary and merges only: the pipeline stored in such
files normalises Unicode and finds special tokens differently from OpenAI's code, which the weights were trained with.
"""

import gzip
import html
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import ftfy
import torch
from tokenizers import Regex
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Pipeline
from torch import Tensor

from usetta.models.base import ModelError
from usetta.progress import track

START = "<|startoftext|>"
END = "<|endoftext|>"
_END_OF_WORD = "</w>"
_MERGES = 48_894
"""How many merges CLIP uses: OpenAI's file lists more."""

_LONG_LIST = 20_000
"""Texts that take so long to tokenize that people are shown a bar."""

# A special token inside a text counts as one, but only where a word can start: "!<|endoftext|>" is punctuation.
_WORD = r"(?i)<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"

Merge = tuple[str, str]


def clean(text: str) -> str:
    """Repair mojibake and HTML entities, collapse white space, lower-case."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes: printable Latin-1 for itself, then the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def vocabulary(merges: Sequence[Merge]) -> dict[str, int]:
    """Ids in CLIP's order: bytes, bytes that end a word, one token per merge, the two special tokens."""
    letters = _byte_alphabet()
    tokens = letters + [letter + _END_OF_WORD for letter in letters] + [a + b for a, b in merges] + [START, END]
    return {token: i for i, token in enumerate(tokens)}


class CLIPTokenizer:
    """Texts to token ids, from merges and (if they do not follow CLIP's order) a vocabulary."""

    def __init__(self, merges: Sequence[Merge], vocab: dict[str, int] | None = None) -> None:
        vocab = vocabulary(merges) if vocab is None else vocab
        self.vocab_size = len(vocab)
        self.start = vocab[START]
        self.end = vocab[END]
        self._special = {START: [self.start], END: [self.end]}
        self._split = Pipeline(
            [Split(Regex(_WORD), behavior="removed", invert=True), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        self._bpe = BPE(vocab, list(merges), end_of_word_suffix=_END_OF_WORD)

    @classmethod
    def from_merges(cls, path: Path) -> "CLIPTokenizer":
        """From a merges file, one pair a line, gzipped or not; a first line `#version` or `"bpe…` is skipped."""
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
        return cls(_parse_merges(text))

    @classmethod
    def from_json(cls, path: Path) -> "CLIPTokenizer":
        """From the `tokenizer.json` of a CLIP repository on the hub."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is not the tokenizer.json of a CLIP model ({error!r})") from None
        return cls.from_content(content, str(path))

    @classmethod
    def from_content(cls, content: Any, source: str) -> "CLIPTokenizer":
        """From what such a file contains; `source` names it in errors."""
        try:
            model = content["model"]
            merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
            return cls(merges, model["vocab"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{source} is not the tokenizer.json of a CLIP model ({error!r})") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without the start and end tokens."""
        ids: list[int] = []
        for word, _ in self._split.pre_tokenize_str(clean(text)):
            ids.extend(self._special.get(word) or (token.id for token in self._bpe.tokenize(word)))
        return ids

    def tokenize(self, texts: Sequence[str], context_length: int = 77) -> Tensor:
        """Ids (n, context_length): start, text, end, then zeros. A text that does not fit raises ValueError."""
        ids = torch.zeros(len(texts), context_length, dtype=torch.long)
        shown = None if len(texts) >= _LONG_LIST else False
        for row, text in track(zip(ids, texts, strict=True), len(texts), "Reading class names", shown):
            tokens = [self.start, *self.encode(text), self.end]
            if len(tokens) > context_length:
                raise ValueError(
                    f"the text has {len(tokens)} tokens, the model takes at most {context_length}: {_shorten(text)!r}"
                )
            row[: len(tokens)] = torch.tensor(tokens)
        return ids


def _parse_merges(text: str) -> list[Merge]:
    lines = text.rstrip("\n").split("\n")
    if lines and lines[0].startswith(("#version", '"bpe_')):
        lines = lines[1:]
    merges = []
    for line in lines[:_MERGES]:
        first, _, second = line.partition(" ")
        merges.append((first, second))
    return merges


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


@lru_cache(maxsize=1)
def default_tokenizer() -> CLIPTokenizer:
    """CLIP's own tokenizer, from the merges in this package; built once a process."""
    packed = resources.files("usetta.models").joinpath("clip_merges.txt.gz").read_bytes()
    return CLIPTokenizer(_parse_merges(gzip.decompress(packed).decode()))
