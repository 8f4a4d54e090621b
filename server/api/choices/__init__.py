"""What completions and chats share: answers that are lists of choices."""
