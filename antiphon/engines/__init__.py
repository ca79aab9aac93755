"""Engines that generate tokens: native, vLLM, and servers that others run (vLLM, SGLang, or OpenAI's protocol).

What an engine must do, also one of your own, is in `engines.base`.
"""
