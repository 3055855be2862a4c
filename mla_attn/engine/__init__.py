"""Continuous batching: requests in, token streams out."""

from mla_attn.engine.engine import PROMPTS_PER_PASS, Engine
from mla_attn.engine.requests import EngineStatistics, OnOutput, Output, QueueFull, SamplingParams

__all__ = ["PROMPTS_PER_PASS", "Engine", "EngineStatistics", "OnOutput", "Output", "QueueFull", "SamplingParams"]
