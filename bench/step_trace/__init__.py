"""`interlace bench timeline` and `interlace trace`: one pipelined step as a timeline.

trace.py      the timeline itself; times in intervals.py
session.py    records a few hits, and takes the median one; its engine is in setup.py
profiler.py   what a GPU did, and device.py, to which layer each copy and kernel belongs
tape.py       what a CPU did, noted by connector.py
build.py      from either to the timeline
figures.py    how long, how much, and what of the load was hidden
file.py       the timeline as a file, which parse.py reads back
text.py       the timeline in words and characters
picture.py    the timeline as a picture
"""
