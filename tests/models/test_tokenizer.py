"""The tokenizer's own contract; equality with OpenAI's is in tests/parity."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usetta.models.base import ModelError
from usetta.models.tokenizer import END, START, CLIPTokenizer, clean, default_tokenizer, vocabulary

TOKENIZER = default_tokenizer()


def test_known_ids() -> None:
    ids = TOKENIZER.tokenize(["a photo of a cat."])
    assert ids.dtype == torch.long
    assert ids.shape == (1, 77)
    assert ids[0, :9].tolist() == [49406, 320, 1125, 539, 320, 2368, 269, 49407, 0]


def test_cleaning() -> None:
    assert clean("  It&amp;#39;s\u00a0a\tCAT\n") == "it's a cat"
    assert clean("cafÃ© l&#39;Ã©tÃ©") == "café l'été"


def test_digits_are_single_and_contractions_split() -> None:
    assert TOKENIZER.encode("747") == [TOKENIZER.encode(digit)[0] for digit in "747"]
    assert TOKENIZER.encode("it's") == TOKENIZER.encode("it 's")


def test_special_tokens_count_only_where_a_word_starts() -> None:
    assert TOKENIZER.encode(f"{START} {END.upper()}") == [49406, 49407]
    assert 49407 not in TOKENIZER.encode("!" + END)


@given(st.text(max_size=40))
def test_rows_are_start_text_end_zeros(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    (row,) = TOKENIZER.tokenize([text], len(tokens) + 5)
    assert row.tolist() == [49406, *tokens, 49407, 0, 0, 0]


def test_too_long_a_text_is_named_with_its_length() -> None:
    with pytest.raises(ValueError, match=r"the text has 102 tokens, the model takes at most 77: 'cat cat .*…'"):
        TOKENIZER.tokenize(["short", "cat " * 100])


def test_no_texts() -> None:
    assert TOKENIZER.tokenize([]).shape == (0, 77)


def test_from_files(tmp_path: Path) -> None:
    merges = [("c", "a"), ("ca", "t</w>")]
    lines = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n"
    (tmp_path / "merges.txt").write_text(lines)
    (tmp_path / "merges.txt.gz").write_bytes(gzip.compress(lines.encode()))
    for style in (lambda pair: " ".join(pair), list):  # older and newer files write a merge differently
        model = {"vocab": vocabulary(merges), "merges": [style(pair) for pair in merges]}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
        tokenizers = [
            CLIPTokenizer.from_json(tmp_path / "tokenizer.json"),
            CLIPTokenizer.from_merges(tmp_path / "merges.txt"),
            CLIPTokenizer.from_merges(tmp_path / "merges.txt.gz"),
        ]
        for tokenizer in tokenizers:
            assert tokenizer.tokenize(["cat"], 4).tolist() == [[514, 513, 515, 0]]


@pytest.mark.parametrize("content", ["{}", "not json", '{"model": {"vocab": {}, "merges": []}}', "[]"])
def test_wrong_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not the tokenizer\.json of a CLIP model"):
        CLIPTokenizer.from_json(path)
