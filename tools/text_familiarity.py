"""What the embedded model needs to notice names that its text tower does not know, and how well it notices them."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from usetta.models.embedded.familiarity import TrainedNames, name_hashes

FILE = "familiar.safetensors"


def make_familiarity(trained: list[str], strange: Tensor, mean: Tensor, directory: Path) -> TrainedNames:
    """Write hashes of the names that trained, sorted, so that the order says nothing, the mean text (D,) and the limit.

    `strange` (n, D) are the features of words that never trained, of which six in ten are nearer than the limit.
    """
    hashes = np.unique(name_hashes(trained))
    mean = torch.nn.functional.normalize(mean, dim=0).half()
    least = torch.quantile(1 - strange @ mean.float(), 0.6)
    tensors = {"trained": torch.from_numpy(hashes.view(np.int32)), "mean": mean, "least": least.reshape(1)}
    save_file(tensors, directory / FILE)
    return TrainedNames(hashes, mean.float(), least.item())


def familiarity_error(distances: Tensor, known: Tensor, least: float) -> dict[str, float]:
    """How well distances (n,) from the mean text separate names that the tower knows, `known` (n,), from others.

    `false_alarms`: percent of known names that are warned about; `misses`: percent of unknown ones that are not;
    `right`: percent of the warnings that are about unknown ones.
    """
    good, bad, warned = distances[known], distances[~known], distances < least
    above = (good[:, None] > bad).float().mean() + 0.5 * (good[:, None] == bad).float().mean()
    return {
        "names": len(distances),
        "known": 100 * known.float().mean().item(),
        "auroc": above.item(),
        "false_alarms": 100 * (good < least).float().mean().item(),
        "misses": 100 * (bad >= least).float().mean().item(),
        "right": 100 * (~known[warned]).float().mean().item(),
    }
