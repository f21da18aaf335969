"""ECALP: labels spread over a graph of the classes and all images so far.

An image is joined to its 3 nearest classes and its 8 nearest images, itself included, with cosines to the power of 10.
Between images the features of the older one are weighted by how much each dimension varies over the classes. Labels
flow three rounds through the symmetric, normalised graph from the classes, which keep theirs, to a second copy of the
newest image, where the answer is read. Afterwards each image keeps a fifth of its best label.

Every image updates the whole graph, so the cost of an image grows with the stream. `nodes` bounds the graph: the oldest
image leaves, and images that were joined to it look for another neighbour.
"""

import torch
from torch import Tensor

from usetta.methods.memory.base import Answers, State, Stream, unit
from usetta.methods.options import Count, Seed

_SHARPENING, _KEPT, _POWER = 10000.0, 0.2, 10


def ecalp(
    state: State | None,
    answers: Answers,
    stream: Stream,
    *,
    text_neighbours: Count = 3,
    image_neighbours: Count = 8,
    rounds: Count = 3,
    nodes: Seed = 0,
) -> tuple[Tensor, State]:
    """Logarithms (B, C) of probabilities by Li et al., ICLR 2025. `nodes` is the most images kept, 0 for all."""
    text = stream.text
    varies = unit(text.var(dim=0)) if len(text) > 1 else torch.ones_like(text[0])
    state = state or _empty(text, text_neighbours, image_neighbours)
    out = torch.empty_like(answers.logits)
    for i, feature in enumerate(answers.features):
        if nodes and int(state["count"]) >= nodes:
            _forget_oldest(state)
        graph = _add(state, feature, unit(varies * feature), text)
        out[i] = _SHARPENING * _spread(state, graph, len(text), rounds)
    return out, state


def _empty(text: Tensor, text_neighbours: int, image_neighbours: int) -> State:
    dim, k_text = text.shape[1], min(text_neighbours, len(text))
    whole = torch.empty(0, dtype=torch.long, device=text.device)
    return {
        "count": torch.zeros((), dtype=torch.long),
        "features": text.new_empty(0, dim),
        "weighted": text.new_empty(0, dim),
        "near": text.new_empty(0, image_neighbours),
        "neighbours": whole.new_empty(0, image_neighbours),
        "text_near": text.new_empty(0, k_text),
        "text_neighbours": whole.new_empty(0, k_text),
        "label": whole,
        "belief": text.new_empty(0),
    }


def _add(state: State, feature: Tensor, weighted: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Join the newest image; return values and neighbours (n + 1, k) of the graph with its second copy."""
    n = int(state["count"])
    _make_room(state, n + 1)
    near, neighbours = state["near"], state["neighbours"]
    itself = weighted @ feature
    # Similarities to older images, to the new one, and to its copy, which are equal.
    to_older = state["weighted"][:n] @ feature
    cosines, classes = (text @ feature).topk(state["text_near"].shape[1])
    state["features"][n], state["weighted"][n] = feature, weighted
    state["text_near"][n], state["text_neighbours"][n] = cosines, classes
    state["label"][n], state["belief"][n] = 0, 0
    own, places = _best(torch.cat([to_older, itself[None]])[None], None, near.shape[1])
    near[n, : own.shape[1]], neighbours[n, : own.shape[1]] = own[0], places[0]
    near[n, own.shape[1] :], neighbours[n, own.shape[1] :] = -torch.inf, n
    if n:
        near[:n], neighbours[:n] = _merge(near[:n], neighbours[:n], to_older, n)
    state["count"] += 1
    # The copy is only there while the image is answered.
    with_copy = torch.cat([to_older, itself[None]])
    values, joined = _merge(near[: n + 1], neighbours[: n + 1], with_copy, n + 1)
    row, columns = _best(torch.cat([with_copy, itself[None]])[None], None, near.shape[1])
    short = near.shape[1] - row.shape[1]
    row = torch.nn.functional.pad(row, (0, short), value=-torch.inf)
    columns = torch.nn.functional.pad(columns, (0, short))
    return torch.cat([values, row]), torch.cat([joined, columns])


def _merge(near: Tensor, neighbours: Tensor, to_new: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Neighbour lists (n, k) with one more candidate each; among equals those that were there stay."""
    values = torch.cat([near, to_new[:, None]], dim=1)
    places = torch.cat([neighbours, torch.full_like(neighbours[:, :1], new)], dim=1)
    return _best(values, places, near.shape[1])


def _best(values: Tensor, places: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    best, order = values.sort(dim=-1, descending=True, stable=True)
    best, order = best[:, :k], order[:, :k]
    return best, order if places is None else places.gather(1, order)


def _spread(state: State, graph: tuple[Tensor, Tensor], classes: int, rounds: int) -> Tensor:
    """The label (C,) of the newest image's copy; keeps the best label of every image."""
    near, neighbours = graph
    n = len(near)  # images and the copy
    edge = torch.where(torch.isfinite(near), near, 0.0) ** _POWER
    newest = state["text_near"][n - 2 : n - 1]
    text_edge = torch.cat([state["text_near"][: n - 1], newest]) ** _POWER
    text_of = torch.cat([state["text_neighbours"][: n - 1], state["text_neighbours"][n - 2 : n - 1]])
    degree = edge.sum(dim=1) + text_edge.sum(dim=1)
    degree.index_add_(0, neighbours.flatten(), edge.flatten())
    text_degree = edge.new_zeros(classes).index_add_(0, text_of.flatten(), text_edge.flatten())
    scale, text_scale = 1 / (degree.sqrt() + 1e-6), 1 / (text_degree.sqrt() + 1e-6)
    edge = edge * scale[:, None] * scale[neighbours]
    rows = torch.arange(n, device=edge.device).repeat_interleave(edge.shape[1])
    columns, values = neighbours.flatten(), edge.flatten()
    # W + Wᵀ among the images.
    places = torch.stack([torch.cat([rows, columns]), torch.cat([columns, rows])])
    values = torch.cat([values, values])
    weights = torch.sparse_coo_tensor(places, values, (n, n), check_invariants=False).coalesce()
    from_text = edge.new_zeros(n, classes).scatter_(1, text_of, text_edge * scale[:, None] * text_scale[text_of])
    labels = edge.new_zeros(n, classes)
    labels[: n - 1].scatter_(1, state["label"][: n - 1, None], state["belief"][: n - 1, None])
    for _ in range(rounds):
        labels = from_text + torch.sparse.mm(weights, labels)
    belief, label = labels[: n - 1].max(dim=1)
    state["belief"][: n - 1], state["label"][: n - 1] = _KEPT * belief, label
    return labels[-1]


def _make_room(state: State, needed: int) -> None:
    """Tables for at least so many images; doubling keeps the copies rare."""
    if needed > len(state["features"]):
        for name, table in state.items():
            if table.ndim:
                room = table.new_zeros(2 * needed, *table.shape[1:])
                room[: len(table)] = table
                state[name] = room


def _forget_oldest(state: State) -> None:
    n = int(state["count"])
    for table in state.values():
        if table.ndim:
            table[: n - 1] = table[1:n].clone()
    n -= 1
    state["count"] -= 1
    neighbours = state["neighbours"][:n]
    neighbours -= 1
    # Who was joined to the oldest looks again among all that are left.
    lacking = (neighbours < 0).any(dim=1).nonzero()[:, 0]
    if not len(lacking):
        return
    features, weighted = state["features"][:n], state["weighted"][:n]
    older = torch.arange(n, device=lacking.device) < lacking[:, None]
    near = torch.where(older, features[lacking] @ weighted.T, weighted[lacking] @ features.T)
    best, places = _best(near, None, neighbours.shape[1])
    state["near"][lacking, : best.shape[1]], neighbours[lacking, : best.shape[1]] = best, places
    state["near"][lacking, best.shape[1] :] = -torch.inf
    neighbours[lacking, best.shape[1] :] = 0
