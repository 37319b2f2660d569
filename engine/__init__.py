"""Requests, blocks, scheduling, the loop, the async API, text in and out.

Plain Python: importing anything in here imports no torch. The other folders are known as
Protocols (`ports.py`); `interlace.AsyncEngine` wires them in.
"""
