"""Engines that generate tokens: native, vLLM, SGLang, and servers that speak OpenAI's protocol.

What an engine must do, also one of your own, is in `engines.base`.
"""
