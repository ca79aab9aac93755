"""One HTTP server for all live attempts: it speaks OpenAI's and Anthropic's protocols and keeps every token, exactly."""
