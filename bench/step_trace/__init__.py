"""`interlace bench timeline` and `interlace trace`: one pipelined step, or one prompt from both
ends, as a timeline.

    trace.py        the timelines themselves; times in intervals.py, what they are of in facts.py
    session.py      records a few hits, and takes the median one; what they need is in setup.py
    layerwise.py    timelines of steps that load layer by layer
    profiler.py     what a GPU did, and device.py, to which layer each copy and kernel belongs
    tape.py         what a CPU did, noted by connector.py; what all who note share is in taped.py
    build.py        from either to the timeline
    hybrid.py       the same of prompts that are computed from the front and loaded from the back,
                    with hybrid_device.py, hybrid_tape.py, hybrid_connector.py and hybrid_build.py
    figures.py      how long, how much, and what was hidden
    file.py         a timeline as a file, which parse.py reads back
    text.py         a timeline in words and characters
    picture.py      a timeline as a picture
"""
