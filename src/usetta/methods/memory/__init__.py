"""What is remembered from image to image? Nothing, for most methods; a memory makes a method one for streams.

A memory stands behind the readout: it takes the answer that the rest of the recipe gives for an image (`tda+se` is
TDA's memory behind self-ensembling), or it chooses among the views itself. One module for each, see `base` for what
they have in common.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from usetta.methods.memory.base import Answers, Memory, State, Stream, Views
from usetta.methods.memory.bca import bca
from usetta.methods.memory.dmn import dmn, dmn_weak
from usetta.methods.memory.dota import dota
from usetta.methods.memory.dpe import dpe
from usetta.methods.memory.ecalp import ecalp
from usetta.methods.memory.onzeta import onzeta
from usetta.methods.memory.tda import boost_adapter, tda
from usetta.registry import Registry

__all__ = ["MEMORIES", "Answers", "Memory", "State", "Stream", "Views"]

MEMORIES: Registry[Memory] = Registry("memory")


def _caches(c: int, d: int, options: Mapping[str, Any]) -> float:
    kept, doubtful = options["capacity"], options["negative_capacity"]
    return float(c * ((kept + doubtful) * (d + 1) + doubtful * c / 4))


def _attended(c: int, d: int, options: Mapping[str, Any]) -> float:
    slots = options["capacity"] + 1
    return float(c * (slots * (d + slots + 1) + 1))


def _graph(c: int, d: int, options: Mapping[str, Any]) -> float:
    if not options["nodes"]:
        return inf
    neighbours = options["image_neighbours"] + min(options["text_neighbours"], c)
    return float(2 * options["nodes"] * (2 * d + 3 * neighbours + 3) + 1)  # tables double when they are full


MEMORIES.register("tda", Memory(tda, numbers=_caches))
MEMORIES.register("dmn-weak", Memory(dmn_weak, returns="probabilities", numbers=_attended))
MEMORIES.register("dmn", Memory(dmn, sees="views", returns="probabilities", numbers=_attended))
MEMORIES.register("boostadapter", Memory(boost_adapter, sees="views", numbers=_caches))
MEMORIES.register("dpe", Memory(dpe, sees="views", numbers=lambda c, d, o: c * (o["capacity"] + 2) * (d + 1) + 2))
MEMORIES.register("ecalp", Memory(ecalp, returns="probabilities", numbers=_graph))
MEMORIES.register("onzeta", Memory(onzeta, returns="probabilities", numbers=lambda c, d, _: c * (d + 1) + 2))
MEMORIES.register("dota", Memory(dota, sees="views", numbers=lambda c, d, _: c * (d * d + d + 1) + d * d))
MEMORIES.register("bca", Memory(bca, sees="views", returns="probabilities", numbers=lambda c, d, _: c * (c + d + 2)))
