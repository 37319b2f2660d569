"""Requests, blocks, scheduling, the loop, text in and out. Plain Python: no torch."""
