"""Measuring and proving: one clock, one result format, one set of prompts for every surface."""
