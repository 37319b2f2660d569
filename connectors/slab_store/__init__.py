"""KV blocks in slab files that processes share: format, writing, reading, room. No torch.

    DIR/interlace-slabs.json                 says what DIR is, and in which version
    DIR/<16 hex of what KV it holds>/        a space: KV that is equal for equal hashes
        <when, and by whom>.slab             final size from creation, sparse; append-only
        <when, and by whom>.slab.new         being made
        hits.log, hits.old.log               the latest loads, for people: `hits.py`

A slab is a header in clear text, an index, and records; a record is one block over all layers. A
process writes to slabs of its own, and holds a lock on each while it does: `slab.py`,
`slab_writer.py`. What lies where is looked up in memory, kept up to date by looks at the disk:
`catalog.py`, `watch.py`. Records are read by lanes that share a queue: `reading.py`,
`read_queue.py`. Room is made by removing whole slabs, the least recently used first:
`directory.py`.

Nothing here is for the event loop, but for `Catalog`'s questions.
"""
