"""Distillation, from prompts to a draft and its report. What needs no engine: decoding/distill."""
