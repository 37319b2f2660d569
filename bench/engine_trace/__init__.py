"""What `AsyncEngine.trace` has written, read back and shown: `interlace trace FILE`.

    parse.py        the file, with everything in it checked
    shape.py        what is within what: the loads of a step, the times of a lane
    figures.py      of each step: how long, what waited, what was hidden; of all: where time went
    text.py         those in words
    picture.py      the last steps as a picture

The records, and the writing, are in `interlace.engine`: `engine_trace.py`, `trace_file.py`. Spans,
figures of two lanes and the look of pictures are those of `interlace.bench.step_trace`.
"""
