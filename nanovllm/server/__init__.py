"""Speaks OpenAI's API over HTTP, and shows the engine's live page.

errors        errors in OpenAI's shape
protocol      the bodies of requests: fields, defaults, checks
responses     answers and chunks, and responses that are sent piece by piece
parts         tools, KV transfer and the page, which a door passes to the server
generation    one HTTP request as one or several engine requests
completions   /v1/completions
chat          /v1/chat/completions
tools         functions that a client describes, and calls of them
access        where a server listens, its address for users, which clients may use it, and how much
it accepts from them: settings, flags, limits middleware    checks of host, origin, key and body,
before a request reaches the application shares        how many requests may wait, how many of them
may have the same key, and the chats that wait for the template metrics       /metrics stats_log
a line in the log every ten seconds while the server is busy page          the page that shows the
engine at work, its files, and recorded traces signalled     a web server that ends at a signal,
with deadlines for a request's headers and body, and a limit on connections app           the
routes, and the server's process"""
