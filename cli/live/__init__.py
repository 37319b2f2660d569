"""The live view, in a process of its own: what `interlace top` shows of an engine that runs."""
