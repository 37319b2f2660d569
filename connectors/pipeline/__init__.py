"""PipelineConnector's parts: host records, the layer pipeline, both sides.

Read `messages.py` first: what the two sides tell each other.
"""
