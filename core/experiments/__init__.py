"""Experiments: traffic split over sets of switches, one row for each request, and the report on them. See docs/experiments.md."""
