"""Scheduling: requests, the step plan, the engine and its front ends."""
