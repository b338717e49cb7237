"""Drafters: one file each."""
