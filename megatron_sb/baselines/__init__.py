"""Baselines of stick-breaking attention: softmax attention with several position encodings, and geometric attention."""
