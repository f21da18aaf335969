"""What is remembered from image to image? Nothing, for most methods; a memory makes a method one for streams.

A memory stands behind the readout: it takes the answer that the rest of the recipe gives for an image (`tda+se` is
TDA's memory behind self-ensembling), or it chooses among the views itself. One module for each, see `base` for what
they have in common.
"""

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
MEMORIES.register("tda", Memory(tda))
MEMORIES.register("dmn-weak", Memory(dmn_weak, returns="probabilities"))
MEMORIES.register("dmn", Memory(dmn, sees="views", returns="probabilities"))
MEMORIES.register("boostadapter", Memory(boost_adapter, sees="views"))
MEMORIES.register("dpe", Memory(dpe, sees="views"))
MEMORIES.register("ecalp", Memory(ecalp, returns="probabilities"))
MEMORIES.register("onzeta", Memory(onzeta, returns="probabilities"))
MEMORIES.register("dota", Memory(dota, sees="views"))
MEMORIES.register("bca", Memory(bca, sees="views", returns="probabilities"))
