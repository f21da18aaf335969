"""Made-up class names that take as many tokens as ImageNet's: most one or two, a few up to seven."""

import random

# Each is one token of CLIP's.
_WORDS = """
    cat dog owl fox hen crane duck goose swan eagle hawk frog shark ray crab snail ant bee fly moth lion tiger bear
    wolf deer horse pig sheep goat cow rabbit mouse rat bat whale seal otter monkey ape panda barn boat bus car truck
    train plane ship bike cart tank van jeep church castle tower bridge wall fence gate tent house palace library
    prison school bench chair table desk sofa bed lamp clock radio phone camera piano guitar drum flute horn violin
    knife fork spoon cup bowl plate pan pot bottle glass jar bag box basket coat hat boot shoe sock glove shirt dress
    ring mask apple lemon orange banana fig corn mushroom bread pizza coffee wine tree flower daisy rose lake beach
    valley volcano cliff island
""".split()  # noqa: SIM905 - a list of 128 strings would be as many lines

_LENGTHS = [1] * 30 + [2] * 54 + [3] * 11 + [4] * 3 + [5, 7]
"""Tokens of 100 ImageNet names."""


def class_names(count: int) -> list[str]:
    """As many different names; where words for short ones run out, they get one word more."""
    rng = random.Random(0)  # noqa: S311
    found: dict[str, None] = {}
    while len(found) < count:
        length = _LENGTHS[len(found) % len(_LENGTHS)]
        name = " ".join(rng.sample(_WORDS, length))
        while name in found:
            length += 1
            name = " ".join(rng.sample(_WORDS, length))
        found[name] = None
    return list(found)
