"""Where work runs: in this process, on a Ray cluster, or in several processes that each take their share."""

from usetta.distributed.local import Engine, EngineError, Failed, LocalEngine, VerifiedLoader, Work, Worker, has_gpus
from usetta.distributed.pacing import Pace
from usetta.distributed.ray import RayEngine
from usetta.distributed.shards import Shard

__all__ = [
    "Engine",
    "EngineError",
    "Failed",
    "LocalEngine",
    "Pace",
    "RayEngine",
    "Shard",
    "VerifiedLoader",
    "Work",
    "Worker",
    "has_gpus",
]
