"""`interlace bench run FILE.toml` and `interlace bench compare A.json B.json`: grids of arms.

    axes.py      what a grid can vary: keys, their meaning, what values they take
    points.py    one arm as values of those keys; which of them matter to it
    spec.py      a file's text as arms, or a refusal that says what to change
    plan.py      names of arms, the order of each round, which arms share an engine
    delayed.py   a PipelineConnector whose loads can be delayed from request to request
    engines.py   the engines, and how one arm is run on them
    session.py   loads the models, runs the rounds
    record.py    what is kept of a run, as JSON, written atomically
    tables.py    a run as a report, with the lengths from which loading pays
    compare.py   two runs, arm by arm
    pictures.py  a run as pictures (matplotlib)

The project's own files are in bench/runs/, with a page about each worked experiment.
"""
