"""Recordings of what an engine did: their format, and what can be asked of them afterwards (replay, what-if, timeline)."""
