"""shardpull for vLLM."""
