"""Sampling in parts that switch apart. Order of `adjust_logits`: penalties, bias, stops; then temperature; then truncation."""
