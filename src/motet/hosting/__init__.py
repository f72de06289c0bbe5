"""The engine of a service, in a process of its own: it trains and answers while the other process talks to people.

Messages are lines of JSON. On a socket the engine outlives the other process, and the next one takes it over (`line`). On its
standard input and output, or at an address, it ends when its input does. Jobs then stay as they were last committed.
"""
