"""OpenAI's HTTP API over one engine or several, with vLLM's fields and ours for hidden states."""
