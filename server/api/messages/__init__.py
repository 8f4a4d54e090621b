"""POST /v1/messages: Anthropic's Messages API, answered as the chat that it is."""
