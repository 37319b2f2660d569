"""`interlace bench overlap`: what loading KV costs beside computing, in parts.

    parts.py       the parts by name
    session.py     opens what they share, runs them, reports
    sizes.py       how much work each part does, and what room it needs
    rig.py         what a part is given
    engines.py     the engines, each opened when a part first asks for it
    meter.py       what PipelineConnector does for a request, noted by connector.py
    arms.py        one request at a time, loaded in a given way
    link_rig.py    copies with no engine, between places that lives.py makes up
    host_cost.py   steps with no model
    crowd.py       many requests that decode, and the gaps between their tokens
    pairs.py       two engines in turns, until the noise is small

Each part is a function from `Rig` to rows and checks, in a module of its name.
"""
