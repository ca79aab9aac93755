"""Models of transformers over packs: loading, attention, log-probs, adapters."""
