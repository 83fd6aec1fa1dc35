"""What the trainer's side and vLLM's workers say to each other."""

READY = "vllm.ready"
"""Topic of a worker's message to the sender: it serves syncs now. The body is the update's ticket."""

GIVEN_UP = -1
"""In the place of a ticket: the update is over before it began. vLLM has no call for that; one that fails ends it."""
