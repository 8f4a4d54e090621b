"""Text in and out: tokenizer, chat template, detokenizer with stop strings. Imports neither engine nor api, and no torch."""

from server.text.chat_template import ChatTemplate
from server.text.conversation import ChatMessage, ChatTemplateError, merge_messages
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["ChatMessage", "ChatTemplate", "ChatTemplateError", "Detokenizer", "Tokenizer", "TokenizerError", "merge_messages"]
