"""Scheduling: requests, the step plan, the engine and its front ends."""

from pagedraft.scheduler.llm import LLM, Completion

__all__ = ["LLM", "Completion"]
