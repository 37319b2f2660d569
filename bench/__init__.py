"""Benchmarks behind the figures of the README, and the machinery they share."""
