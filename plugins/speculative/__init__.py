"""Proposers of drafts: each a plugin of its own, which the engine asks in each step what may come next. Verifying is core's."""
