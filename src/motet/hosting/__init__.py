"""The engine of a service, in a process of its own: it trains and answers while the other process talks to people.

Messages are lines of JSON, in on the standard input and out on the standard output. It ends when its input does; jobs then
stay as they were last committed, and the next process takes them up.
"""
