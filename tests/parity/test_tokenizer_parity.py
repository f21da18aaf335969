"""Token ids equal those of OpenAI's `SimpleTokenizer` on more than 10 000 strings."""

import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference import openai_module

from usetta.models.tokenizer import END, START, CLIPTokenizer, default_tokenizer

PIECES = [
    "cat", "Photo", "DOG's", "it's", "they'RE", "we'll", "I'd", "can't", "I'm", "you've", "'s", "''t", "'ſ", "o'clock",
    "3.14", "2024", "747-400", "1st", "½", "Ⅷ", "٣", "三", "x²", "é", "É", "e\u0301", "ﬁne", "ẞ", "İstanbul", "ΣΑΣ",
    "ёлка", "日本語", "हिन्दी", "ภาษา", "العربية", "😀", "👩‍👩‍👧", "🇩🇪", "❤️", "…", "—", "“quoted”",
    "!!!", "?!", "#tag", "@me", "a_b",
    "&amp;", "&amp;amp;lt;", "&#39;", "&eacute;", "&nbsp;", "&#x1F600;", "&notanentity;", "&lt;|endoftext|&gt;",
    "cafÃ©", "â€™s", "Ã¼ber", "schÃ¶n", "l’été", START, END, START.upper(), "!" + END, END + "x", "<|start", "|>",
    " ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff", "\x00", "\x1c", "\x7f", "\u0085",
]  # fmt: skip
NAMES = [
    "2012 Tesla Model S", "Ford F-450 Super Duty Crew Cab 2012", "MD-11", "DHC-8-100", "jack-in-the-pulpit", "T-shirt",
    "black-eyed susan", "love in the mist", "croque_madame", "crème brûlée", "spaghetti_carbonara", "Annual Crop Land",
    "YoYo", "Handstand_Pushups", "gerenuk", "wall clock", "English cocker spaniel", "St. Bernard", "newt (eft)",
]  # fmt: skip


def generated(n: int) -> Iterator[str]:
    """Strings put together from the pieces above and from random characters that Unicode 3.2 already knew.

    The age matters because "letter" and "digit" are what a library's Unicode tables say, and those of `regex` (OpenAI)
    and `tokenizers` (here) are of different versions, which differ on characters added since.
    """
    rng = random.Random(0)
    for _ in range(n):
        kind = rng.random()
        if kind < 0.6:
            joint = rng.choice(["", " ", "  "])
            yield joint.join(rng.choice(PIECES) for _ in range(rng.randint(1, 8)))
        elif kind < 0.8:
            yield "".join(_character(rng) for _ in range(rng.randint(1, 12)))
        elif kind < 0.9:
            yield "".join(rng.choice("abcdefghijklmnopqrstuvwxyz '-.") for _ in range(rng.randint(1, 60)))
        else:
            yield " ".join(rng.choice(PIECES + NAMES) for _ in range(rng.randint(30, 60)))


def _character(rng: random.Random) -> str:
    while True:
        character = chr(rng.randrange(0x20, rng.choice([0x250, 0x3000, 0xD800, 0x20000])))
        if unicodedata.ucd_3_2_0.category(character) not in ("Cn", "Cs", "Co"):
            return character


def class_names(real_images: Path, reference_files: Path) -> list[str]:
    """Class names of datasets that cannot be published."""
    lists = json.loads((reference_files / "align/names.json").read_text())
    names = [name for group in lists.values() for name in group]
    names += [
        name
        for group in json.loads((reference_files / "align/labelled_names.json").read_text()).values()
        for name in _leaves(group)
    ]
    for manifest in sorted(real_images.glob("*/manifest.json")):
        names += {item[2] for item in json.loads(manifest.read_text())["items"]}
    return names


def _leaves(group: object) -> list[str]:
    return [str(name) for name in (group.values() if isinstance(group, dict) else group)]


def assert_equal(texts: list[str]) -> None:
    theirs, ours = openai_module("simple_tokenizer").SimpleTokenizer(), default_tokenizer()
    different = [text for text in texts if ours.encode(text) != theirs.encode(text)]
    assert not different, f"{len(different)} of {len(texts)} differ, first {different[:3]!r}"


@pytest.mark.slow
def test_generated_strings() -> None:
    texts = list(dict.fromkeys([*NAMES, *PIECES, *(f"a photo of a {name}." for name in NAMES), *generated(4_000)]))
    assert len(texts) >= 3_000
    assert_equal(texts)


@pytest.mark.slow
def test_class_names_of_the_datasets(real_images: Path, reference_files: Path) -> None:
    names = class_names(real_images, reference_files)
    assert names
    assert_equal([f"a photo of a {name.replace('_', ' ')}." for name in names[::4]])


def test_merges_are_openais() -> None:
    theirs = openai_module("simple_tokenizer").SimpleTokenizer()
    path = Path(str(openai_module("simple_tokenizer").__file__)).with_name("bpe_simple_vocab_16e6.txt.gz")
    # Their file lists merges beyond the vocabulary, so ours is its beginning.
    assert default_tokenizer().vocab_size == len(theirs.encoder) == 49408
    assert CLIPTokenizer.from_merges(path).encode("jekyll island") == theirs.encode("jekyll island")
