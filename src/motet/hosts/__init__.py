"""The engine process of a service: it trains and answers, while the service's process handles HTTP.

Messages are lines of JSON. With a socket, the engine outlives the service, and the next service takes it over (`line`).
On standard input and output, or at an address, it ends when its input ends. Jobs then keep their last commit.
"""
