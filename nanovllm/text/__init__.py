"""Turns prompts and chats into token ids, and sampled tokens into the outputs that a caller gets
(lecture 18)."""
