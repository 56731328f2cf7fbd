"""The values that callers of the client hold: answers, chats and what servers say of themselves."""
