"""The engine in a process of its own, and the asyncio side that speaks with it."""
