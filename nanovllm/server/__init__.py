"""Speaks OpenAI's API over HTTP, and shows the engine's live page.

app           the routes, and the server's process
access        where a server listens, which clients may use it, and how much it accepts from them
middleware    checks of host, origin, key and body, before a request reaches the application
protocol      the bodies of requests: fields, defaults, checks
admission     which requests come in: how many may wait, and how many of them with the same key
chat          /v1/chat/completions
completions   /v1/completions
generation    one HTTP request as one or several engine requests
responses     answers and chunks, and responses that are sent piece by piece
errors        errors in OpenAI's shape
tools         functions that a client describes, and calls of them
parts         tools, KV transfer and the page, which a door passes to the server
page          the page that shows the engine at work, its files, and recorded traces
metrics       /metrics
stats_log     a line in the log every ten seconds while the server is busy
signalled     a web server that ends at a signal, with deadlines and a limit on connections
"""
