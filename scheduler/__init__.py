"""Scheduling: requests, the step plan, the engine and its front ends."""

from pagedraft.scheduler.async_engine import AsyncEngine
from pagedraft.scheduler.llm import LLM, Completion

__all__ = ["LLM", "AsyncEngine", "Completion"]
