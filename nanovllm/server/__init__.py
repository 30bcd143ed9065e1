"""The OpenAI-compatible server: HTTP on one side, `AsyncEngine` on the other.

errors        what a client is told when something is wrong
protocol      requests: fields, defaults, what is refused
responses     answers and stream chunks
generation    one HTTP request as one or several engine requests
completions   /v1/completions
chat          /v1/chat/completions
middleware    who may ask, and how much
metrics       /metrics
page          the page that shows the engine at work, its files, and recorded traces
app           the routes
run           the process: socket, signals, shutdown
"""
