"""The command line: chat, benchmarks."""
