"""CoOp (Zhou et al., 2022): a context that was learned from a few labelled images, in place of "a photo of a".

A context is a tensor (n, W) that replaces the embeddings of the n tokens before the class name. `ClassPrompts` takes
it, so every method can start from it. It is loaded from CoOp's own checkpoints or from files written here (`context`),
or learned here (`train`) from shots drawn from labelled images (`shots`).
"""

from usetta.coop.context import load_context, save_context, template_for, template_of
from usetta.coop.train import CoOpRecipe, train_context

__all__ = [
    "CoOpRecipe",
    "load_context",
    "save_context",
    "template_for",
    "template_of",
    "train_context",
]
