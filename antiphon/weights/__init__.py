"""Moving weights from the learner to engines: channels, digests, adapters and manifests."""
