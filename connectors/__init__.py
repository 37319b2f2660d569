"""KV connectors: the protocol, stores and pipelines that join with the connector seam."""
