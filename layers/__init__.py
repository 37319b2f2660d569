"""All that touches a device: checkpoints, models, attention, KV pages, the step runner."""
