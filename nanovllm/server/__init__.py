"""Speaks OpenAI's API over HTTP, and shows the engine's live page (lecture 91).

errors        what a client is told when something is wrong
protocol      requests: fields, defaults, what is refused
responses     answers and stream chunks
generation    one HTTP request as one or several engine requests
completions   /v1/completions
chat          /v1/chat/completions
access        who may use a server, and how much it takes in: settings, flags, limits
middleware    checks of host, origin, key and body, before a request reaches the application
connections   deadlines for a request's headers and body, and a limit on connections
shares        how many requests may wait, and how many of them may be one key's
metrics       /metrics
page          the page that shows the engine at work, its files, and recorded traces
app           the routes
run           the process: socket, signals, shutdown
"""
