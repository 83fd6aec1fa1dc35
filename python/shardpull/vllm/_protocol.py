"""What the trainer's side and vLLM's workers say to each other."""

READY = "vllm.ready"
"""Topic of a worker's message to the sender: it serves syncs now. The body is the update's ticket."""
