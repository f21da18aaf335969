"""Where work runs: this process, or a Ray cluster."""

from usetta.distributed.base import Engine, EngineError, Failed, Work, Worker
from usetta.distributed.local import LocalEngine
from usetta.distributed.ray import RayEngine

__all__ = ["Engine", "EngineError", "Failed", "LocalEngine", "RayEngine", "Work", "Worker"]
