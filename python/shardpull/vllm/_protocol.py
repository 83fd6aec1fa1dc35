"""What vLLM's workers say to the trainer, as messages of the fleet: the topics. Each body begins with the ticket of what they were asked."""

JOINED = "vllm.joined"
"""A worker has joined, and "mixed", as its model has parts of an update that failed, or "whole". What is said of its life before comes
before that."""

READY = "vllm.ready"
"""It serves syncs now."""

UPDATED = "vllm.updated"
"""How its update went: JSON with "error", a text or null, and "changed", whether the model has parts of what came. It is no exception
in the worker: of several workers' vLLM takes one, and the others for answers to later calls."""
