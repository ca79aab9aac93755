"""Continuous batching on torch, for decoder models of transformers; the engine is `native.engine.NativeEngine`."""
