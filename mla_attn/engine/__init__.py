"""The serving engine: continuous batching of requests over one model."""

from mla_attn.engine.batch import Result
from mla_attn.engine.engine import Engine
from mla_attn.engine.requests import EngineDead, OnOutput, Output, QueueFull, SamplingParams
from mla_attn.engine.scheduler import PROMPTS_PER_PASS
from mla_attn.engine.statistics import EngineStatistics
from mla_attn.passes import DraftModel, NgramDrafts

__all__ = [
    "PROMPTS_PER_PASS",
    "DraftModel",
    "Engine",
    "EngineDead",
    "EngineStatistics",
    "NgramDrafts",
    "OnOutput",
    "Output",
    "QueueFull",
    "Result",
    "SamplingParams",
]
