"""The engine process of a service: it trains and answers, while the service's process handles HTTP.

Messages are lines of JSON. An engine of a service works on while the HTTP process starts again, and ends with the parent of
both (`line`). On standard input and output, or at an address, it ends when its input ends. Jobs then keep their last commit.
"""
