"""KV blocks in folders of safetensors files, shared by processes: identity, files, index, lanes.

A folder holds a run of consecutive blocks and never changes once it is visible:

    DIR/<16 hex of the model>-v1/<2 hex>/<64 hex>/manifest.json
                                                 /layer_000.safetensors ...
    DIR/<16 hex of the model>-v1/tmp/...         being written, or being removed

Knows nothing of connectors, requests or torch, except for `pages`, which copies from and to the
device's pages.
"""
