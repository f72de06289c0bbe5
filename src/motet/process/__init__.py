"""Processes that Motet starts, what they may do, and the messages between them; and code of users that it loads."""
