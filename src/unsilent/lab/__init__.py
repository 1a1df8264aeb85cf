"""The lab: faults on purpose, to measure what the checks catch. Nothing outside imports it."""
