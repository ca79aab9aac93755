"""Engines that generate tokens: native, vLLM, SGLang, and servers that speak OpenAI's protocol."""
