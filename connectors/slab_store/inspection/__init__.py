"""What a directory of slabs holds, for people who look after it: `interlace store`.

Read `reports.py` first: all that is told. Then `survey.py`, which opens a store and looks at its
slabs, and on which the rest builds, one module a command:

    chains.py         ls: prefixes
    statistics.py     stat: counts and bytes
    verification.py   verify: records against their checksums
    removal.py        rm: which slabs are meant, and removing them
    limits.py         gc: what has to go to keep limits

Safe beside engines that use the directory: slabs are only read, or removed as wholes, and those
that a process writes to are left alone. Knows no tokens: only hashes of blocks are stored.
Blocking file I/O: never on the event loop.
"""
