"""Decisions, as plain Python: events and a clock reading in, actions out; no I/O, no clock of its own."""
