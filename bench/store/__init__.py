"""`interlace bench store`: what KV in files brings, and how near its reads come to the disk's rate.

    parts.py       the parts by name
    session.py     opens what they share, runs them, reports
    rig.py         what a part is given, and what its figures are held to
    shelf.py       slabs that are made directly, without an engine
    page_cache.py  what of files the system keeps in memory, and how to have it dropped

Each part is a function from `StoreRig` to rows and checks, in a module of its name. Those with an
engine take the ones of `interlace bench overlap`, and its arms.
"""
