"""The transformer: configuration, weights, KV cache and the forward pass."""
