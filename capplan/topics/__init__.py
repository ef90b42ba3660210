"""The topics of `capplan explain`, by subject."""

from typing import Final

from capplan.topics.batching import BATCHING
from capplan.topics.cost import COST
from capplan.topics.fit import FIT
from capplan.topics.kv_cache import KV_CACHE
from capplan.topics.one_user import ONE_USER
from capplan.topics.quantization import QUANTIZATION
from capplan.topics.serving import SERVING
from capplan.topics.simulation import SIMULATION
from capplan.topics.speed import SPEED
from capplan.topics.topic import Line, Topic

__all__ = ["TOPICS", "Line", "Topic"]

TOPICS: Final[tuple[Topic, ...]] = (
    *FIT,
    *KV_CACHE,
    *QUANTIZATION,
    *SPEED,
    *SERVING,
    *ONE_USER,
    *BATCHING,
    *COST,
    *SIMULATION,
)
