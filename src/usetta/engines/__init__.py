"""Where work runs: this process, or a Ray cluster."""

from usetta.engines.base import Engine, EngineError, Hand, Lost, Work
from usetta.engines.cluster import RayCluster
from usetta.engines.local import ThisProcess

__all__ = ["Engine", "EngineError", "Hand", "Lost", "RayCluster", "ThisProcess", "Work"]
